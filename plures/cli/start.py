"""The program `plures`. It answers Ctrl-C from its first moment on: so it imports nothing before it can."""

from plures.runs import signals


def main() -> None:
    """Run a command; see `plures.cli.main`."""
    signals.set_handler(signals.leave)
    from plures.cli.main import main as run_command  # here: it takes a while, as torch does later

    run_command()
