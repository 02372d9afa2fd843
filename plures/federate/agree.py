"""How clients of a federation agree on a schema of their tables, which nobody sees all rows of.

Every client tells what its training rows say of each column: how many rows and blanks there are, mean and variance of
numbers, and the words of those columns whose words its policy allows. The server joins them to a schema, and each
client checks whether it can read its rows by it.
"""

import fnmatch

import numpy as np

from plures.data import schema as schemas
from plures.data.dataset import Target
from plures.data.schema import Column, Kind, Schema, Summary
from plures.data.tables import Plan, raw_target
from plures.errors import DataError, RunFailed
from plures.federate import wire
from plures.federate.policy import Policy
from plures.federate.wire import Refused

FILE = "schema.toml"


# At a client


def describe(plan: Plan, train: np.ndarray, policy: Policy, as_words: list[str]) -> wire.SchemaReply:
    """What our training rows say of the columns of our table, as far as our policy allows."""
    policy.check_rows(len(train))
    columns = []
    for name, own in plan.kinds.items():
        kind: Kind = "words" if name in as_words else own
        found = schemas.summarise(name, kind, plan.table.columns[name].rows(train))
        columns.append(_to_tell(found, policy))
    target = Summary(plan.targets[0], "number", len(train), 0)
    classes: list[str] = []
    if plan.kind == "classes":
        if not _may_tell(plan.targets[0], policy):
            raise Refused(
                f"the names of the classes of {plan.targets[0]!r} are asked for, and it is not in words of policy.toml",
                "words",
            )
        classes = list(plan.classes)
    elif plan.kind in ("number", "count"):
        values = raw_target(plan)[train].astype(np.float64)
        target = target._replace(mean=float(values.mean()), variance=float(values.var()))
    return wire.SchemaReply(
        columns=columns, targets=list(plan.targets), task=plan.kind, classes=classes, target=_to_tell(target, policy)
    )


def _may_tell(column: str, policy: Policy) -> bool:
    return any(fnmatch.fnmatchcase(column, pattern) for pattern in policy.words)


def _to_tell(found: Summary, policy: Policy) -> wire.ColumnSummary:
    may_tell = _may_tell(found.name, policy)
    words = [pair for pair in found.counts if may_tell and pair[1] >= policy.least_rows_of_word]
    return wire.ColumnSummary(
        name=found.name,
        column_kind=found.kind,
        n=found.n,
        n_blank=found.n_blank,
        mean=found.mean,
        variance=found.variance,
        words=[word for word, _ in words],
        counts=[n for _, n in words],
    )


def check_offer(text: str, plan: Plan) -> Schema:
    """The schema that the server offers, if our rows can be read by it."""
    schema = schemas.from_toml("the schema that the server offers", schemas.parse(text))
    if schema.target_names != plan.targets or schema.target.kind != plan.kind:
        raise Refused("its target is not ours", "schema")
    for column in schema.columns:
        own = plan.kinds.get(column.name)
        if own is None or column.kind not in (own, "words"):
            raise Refused(f"its column {wire.printable(column.name)!r} is not ours, or of another kind", "schema")
    unknown = [name for name in plan.classes if name not in schema.classes]
    if unknown:
        raise Refused(f"our class {unknown[0]!r} is not in it", "schema")
    return schema


# At the server


def columns_of_words(replies: dict[str, wire.SchemaReply]) -> list[str]:
    """The columns that hold words at one client and something else at another: there they are words for all."""
    kinds: dict[str, set[str]] = {}
    for reply in replies.values():
        for column in reply.columns:
            kinds.setdefault(column.name, set()).add(column.column_kind)
    return sorted(name for name, found in kinds.items() if len(found) > 1)


def join(replies: dict[str, wire.SchemaReply], client: str | None = None) -> Schema:
    """The schema by what all clients tell of their rows."""
    first_name, first = next(iter(replies.items()))
    for name, one in replies.items():
        if (one.targets, one.task) != (first.targets, first.task):
            raise RunFailed(
                f"{first_name} predicts {', '.join(first.targets)} ({first.task}), "
                f"and {name} {', '.join(one.targets)} ({one.task}); start them with the same --target and --task"
            )
        odd = sorted({column.name for column in one.columns} ^ {column.name for column in first.columns})
        if odd:
            raise RunFailed(f"{first_name} and {name} do not both have the column {odd[0]!r}; start them with --drop")
    columns: list[Column] = []
    for column in first.columns:
        parts = [_summary(next(c for c in reply.columns if c.name == column.name)) for reply in replies.values()]
        found = schemas.join(parts)
        made = schemas.column_of(found)
        told = sum(n for _, n in found.counts)
        if made.kind == "words" and told < found.n:
            made = made._replace(has_other=True)  # words that some clients do not tell
        if not schemas.says_nothing(made, found):
            columns.append(made)
    if not columns:
        raise DataError("no column is left that tells anything; clients may allow words in their policy.toml")
    classes = sorted({name for reply in replies.values() for name in reply.classes}, key=schemas.order_of_class)
    target = schemas.join([_summary(reply.target) for reply in replies.values()])
    made_target = Target(first.task)
    if first.task == "number":
        made_target = Target("number", target.mean, target.variance**0.5 or 1.0)
    elif first.task == "count":
        made_target = Target("count", 0.0, target.mean or 1.0)
    elif first.task == "classes" and len(classes) < 2:
        raise DataError(f"all clients together have {len(classes)} class of {first.targets[0]!r}; two are needed")
    return Schema(tuple(columns), tuple(first.targets), made_target, tuple(classes), client)


def _summary(told: wire.ColumnSummary) -> Summary:
    if len(told.words) != len(told.counts):
        raise DataError("a client tells words without their numbers")
    counts = tuple(zip(told.words, told.counts, strict=True))
    return Summary(told.name, told.column_kind, told.n, told.n_blank, told.mean, told.variance, counts)
