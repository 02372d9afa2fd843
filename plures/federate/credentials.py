"""The folder of a federation, made by `plures federate init`: certificates, keys, addresses and a README."""

import datetime
import hashlib
import ipaddress
import json
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from plures.errors import UsageError
from plures.federate.address import Address
from plures.federate.wire import Refused
from plures.files import read_toml, write_bytes

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
YEARS_OF_CA, DAYS_OF_SERVER = 10, 800  # validity of the certificates


class Home(NamedTuple):
    """The folder of the server, and its addresses."""

    folder: Path
    port: int  # of 127.0.0.1, where the server listens
    host: str  # host that clients connect to
    open_port: int  # port that clients connect to
    insecure: bool  # plain HTTP without keys

    @property
    def address(self) -> Address:
        """The address of the server for commands on its own machine."""
        return Address("127.0.0.1", self.port, None if self.insecure else self.folder / "ca.crt")

    @property
    def secret(self) -> bytes:
        """The secret with which processes on this machine may send messages."""
        return (self.folder / "secret").read_bytes()

    @property
    def operator_key(self) -> bytes | None:
        """The private key with which requests to clients are signed; None with plain HTTP."""
        path = self.folder / "operator.key"
        return path.read_bytes() if path.exists() else None

    def clients(self) -> list[str]:
        """The names of all clients that have a folder."""
        return sorted(path.name for path in (self.folder / "clients").glob("*") if path.is_dir())

    def key_files(self) -> dict[Path, float]:
        """The public keys of all clients, and when each was written."""
        paths = [self.folder / "clients" / name / "node.key.pub" for name in self.clients()]
        return {path: path.stat().st_mtime for path in paths if path.exists()}

    def public_key(self, name: str) -> bytes:
        """The public key of a client, in the form that Flower needs."""
        return _read_public_key(self.folder / "clients" / name / "node.key.pub")

    def removed_keys(self) -> set[bytes]:
        """The public keys of clients that were removed, which are never taken again."""
        found = set()
        for path in (self.folder / "removed").glob("*/node.key.pub"):
            with suppress(UsageError):
                found.add(_read_public_key(path))
        return found


def _read_public_key(path: Path) -> bytes:
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
        return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is not a public key: {error}") from None


class Kit(NamedTuple):
    """The folder of a client, which it gets from the operator of the server."""

    folder: Path
    name: str
    server: Address

    @property
    def key(self) -> Path | None:
        """The private key of the client; None with plain HTTP."""
        return None if self.server.ca is None else self.folder / "node.key"


def open_home(folder: Path) -> Home:
    """Read the folder of a server."""
    if not (folder / "federation.toml").exists():
        raise UsageError(f"{folder} is not the folder of a federation; make one with `plures federate init {folder}`")
    values = read_toml(folder / "federation.toml")
    return Home(folder, *(values[key] for key in ("port", "host", "open_port", "insecure")))


def open_kit(folder: Path, name: str) -> Kit:
    """Read the folder of a client: inside the server's folder, or a copy of it elsewhere."""
    place = folder / "clients" / name if (folder / "clients" / name).is_dir() else folder
    if not (place / "client.toml").exists():
        raise UsageError(
            f"{folder} has no client {name}; make one with `plures federate init {folder} --client {name}`, "
            "or give the folder that you got from the operator of the server with --home"
        )
    values = read_toml(place / "client.toml")
    if values["name"] != name:
        raise UsageError(f"{place} is the folder of {values['name']}, not of {name}")
    host, port = values["host"], values["port"]
    if values["insecure"] and host not in LOOPBACK:
        raise UsageError(f"plain HTTP is for 127.0.0.1 alone, but the server is {host}; make certificates instead")
    return Kit(place, name, Address(host, port, None if values["insecure"] else place / "ca.crt"))


def make_home(folder: Path, clients: list[str], port: int, address: str, more_hosts: list[str], insecure: bool) -> Home:
    """Make the folder of a new federation, or add clients to an existing one."""
    for name in clients:
        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot be a client's name: use letters, digits, dots, dashes and underscores")
    if (folder / "federation.toml").exists():
        home = open_home(folder)
    else:
        home = _make_new(folder, port, address, more_hosts, insecure)
    if not home.insecure and not (folder / "operator.key").exists():
        _write_operator(folder)
    for name in clients:
        _write_kit(home, name)
    (folder / "README.md").write_text(_readme(home), encoding="utf-8")
    return home


def remove_client(home: Home, name: str) -> Path:
    """Move the folder of a client out of the way. Returns where it is now."""
    place = home.folder / "clients" / name
    if not NAME.fullmatch(name) or not place.is_dir():
        raise UsageError(f"{home.folder} has no client {name!r}; it has {', '.join(home.clients()) or 'none'}")
    target = home.folder / "removed" / f"{name}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"
    target.parent.mkdir(exist_ok=True, mode=0o700)
    place.rename(target)
    return target


def rotate_key(home: Home, name: str, public_key: Path | None) -> None:
    """Give a client a new pair of keys, or take the public key of a pair that it has made itself."""
    place = home.folder / "clients" / name
    if home.insecure or not NAME.fullmatch(name) or not place.is_dir():
        raise UsageError(f"{home.folder} has no client {name!r} with a key")
    if public_key is None:
        _write_key_pair(place)
        return
    try:
        content = public_key.read_bytes()
        serialization.load_ssh_public_key(content)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{public_key} is not a public key: {error}") from None
    write_bytes(place / "node.key.pub", content)
    (place / "node.key").unlink(missing_ok=True)


def rotate_certificate(home: Home, more_host: str = "") -> None:
    """A new certificate of the server, signed by the same authority, for the same names and perhaps one more."""
    if home.insecure:
        raise UsageError("plain HTTP has no certificate")
    old = x509.load_pem_x509_certificate((home.folder / "server.crt").read_bytes())
    names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if more_host and _general_name(more_host) not in names:
        names = x509.SubjectAlternativeName([*names, _general_name(more_host)])
    authority = serialization.load_pem_private_key((home.folder / "ca.key").read_bytes(), None)
    assert isinstance(authority, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _leaf(old.issuer, old.subject, names, key)
    _write_private(home.folder / "server.key", _pem(key))
    certificate = builder.sign(authority, hashes.SHA256())
    write_bytes(home.folder / "server.crt", certificate.public_bytes(serialization.Encoding.PEM))


def _make_new(folder: Path, port: int, address: str, more_hosts: list[str], insecure: bool) -> Home:
    host, open_port = _host_and_port(address, port)
    home = Home(folder, port, host, open_port, insecure)
    if insecure and host not in LOOPBACK:
        raise UsageError(f"plain HTTP is for 127.0.0.1 alone, got --address {address}; leave --insecure out")
    folder.mkdir(parents=True, exist_ok=True)
    os.chmod(folder, 0o700)
    if not insecure:
        _write_certificates(folder, list(dict.fromkeys(["localhost", "127.0.0.1", *more_hosts, host])))
    _write_private(folder / "secret", secrets.token_bytes(32))
    _write_addresses(home)
    return home


def _host_and_port(address: str, port: int) -> tuple[str, int]:
    host, _, open_port = address.partition(":")
    if open_port and not open_port.isdigit():
        raise UsageError(f"--address is HOST or HOST:PORT, got {address!r}")
    return host, int(open_port or port)


def _write_addresses(home: Home) -> None:
    values = {"port": home.port, "host": home.host, "open_port": home.open_port, "insecure": home.insecure}
    _write_toml(home.folder / "federation.toml", values)
    (home.folder / "nginx.conf").write_text(_NGINX.format(host=home.host, port=home.port), encoding="utf-8")


def move(home: Home, address: str) -> Home:
    """The same federation with another address for clients, and a certificate for it by the same authority."""
    host, open_port = _host_and_port(address, home.port)
    home = home._replace(host=host, open_port=open_port)
    _write_addresses(home)
    if not home.insecure:
        rotate_certificate(home, host)
    for name in home.clients():
        _write_kit(home, name)
    (home.folder / "README.md").write_text(_readme(home), encoding="utf-8")
    return home


def _write_kit(home: Home, name: str) -> None:
    place = home.folder / "clients" / name
    place.mkdir(parents=True, exist_ok=True)
    os.chmod(place, 0o700)
    values = {"name": name, "host": home.host, "port": home.open_port, "insecure": home.insecure}
    _write_toml(place / "client.toml", values)
    if home.insecure:
        return
    for file in ("ca.crt", "operator.pub"):
        (place / file).write_bytes((home.folder / file).read_bytes())
    if (place / "node.key.pub").exists():
        return  # a client may have made its own key pair and given us the public key
    _write_key_pair(place)


def _write_key_pair(place: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    _write_private(
        place / "node.key",
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    write_bytes(place / "node.key.pub", public + b"\n")


# Signed requests. Whoever reaches the port of a Flower server can send messages through it, and so can whoever has
# taken it over: a client answers only requests that one of its operators has signed.

SEALED = b"plures-1"  # begins a signed message
SIGNATURE = 64  # bytes of a signature


def _write_operator(folder: Path) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    _write_private(folder / "operator.key", key.private_bytes_raw())
    (folder / "operator.pub").write_text(key.public_key().public_bytes_raw().hex() + "\n", encoding="utf-8")


def seal(key: bytes | None, client: str, message: bytes) -> bytes:
    """A request to a client, signed; as it is if there is no key."""
    if key is None:
        return message
    return SEALED + ed25519.Ed25519PrivateKey.from_private_bytes(key).sign(_signed(client, message)) + message


def unseal(keys: list[bytes], client: str, sealed: bytes) -> bytes:
    """The request in a signed message to this client; raises Refused if none of the keys has signed it."""
    message, signature = sealed, b""
    if sealed.startswith(SEALED):
        begin = len(SEALED) + SIGNATURE
        message, signature = sealed[begin:], sealed[len(SEALED) : begin]
    if not keys:
        return message
    for key in keys:
        try:
            ed25519.Ed25519PublicKey.from_public_bytes(key).verify(signature, _signed(client, message))
            return message
        except (InvalidSignature, ValueError):
            continue
    raise Refused("nobody who may ask has signed it (operators in policy.toml)", "operator")


def _signed(client: str, message: bytes) -> bytes:
    return SEALED + client.encode() + b"\0" + hashlib.blake2b(message).digest()


def operator_keys(folder: Path, files: list[str]) -> list[bytes]:
    """The public keys of those who may ask a client, of those files that exist."""
    found = []
    for path in [folder / file for file in files]:
        if path.exists():
            try:
                found.append(bytes.fromhex(path.read_text(encoding="utf-8").strip()))
                ed25519.Ed25519PublicKey.from_public_bytes(found[-1])
            except ValueError:
                raise UsageError(f"{path} is not the public key of an operator") from None
    return found


def _write_private(path: Path, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def _write_toml(path: Path, values: dict[str, Any]) -> None:
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()), encoding="utf-8")


def _write_certificates(folder: Path, hosts: list[str]) -> None:
    """Make a certificate authority, and a server certificate that it signs."""
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Plures federation")])
    ca = _certificate_builder(issuer, issuer, authority, 365 * YEARS_OF_CA)
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca = ca.add_extension(_key_usage(signs_certificates=True), critical=True)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[-1][:64])])
    leaf = _leaf(issuer, name, x509.SubjectAlternativeName([_general_name(host) for host in hosts]), server)
    for file, builder, key in (("ca", ca, authority), ("server", leaf, server)):
        certificate = builder.sign(authority, hashes.SHA256())
        (folder / f"{file}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_private(folder / f"{file}.key", _pem(key))


def _certificate_builder(
    issuer: x509.Name, name: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    start = now - datetime.timedelta(minutes=5)
    return builder.not_valid_before(start).not_valid_after(now + datetime.timedelta(days=days))


def _leaf(
    issuer: x509.Name, name: x509.Name, hosts: x509.SubjectAlternativeName, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    """The certificate of a server, not yet signed."""
    leaf = _certificate_builder(issuer, name, key, DAYS_OF_SERVER)
    leaf = leaf.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    leaf = leaf.add_extension(_key_usage(signs_certificates=False), critical=True)
    leaf = leaf.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return leaf.add_extension(hosts, critical=False)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _readme(home: Home) -> str:
    folder = home.folder
    lines = [f"plures federate server --home {folder}"]
    lines += [f"plures federate client --home {folder} --name {name} --data {name}.npz" for name in home.clients()]
    lines += [f"plures federate start fedavg --home {folder}", f"plures federate status --home {folder}"]
    commands = "\n".join(f"    {line}" for line in lines)
    return f"""# A federation of Plures

Run each of these commands in its own terminal, in the folder that contains `{folder}`:

{commands}

- `clients/NAME` is what client NAME needs. Copy it to the client's machine over a secure channel, name it there with
  `--home`, and delete `node.key` here. Or let the client make its own key pair
  (`ssh-keygen -t ecdsa -b 384 -N "" -f node.key`), and put its `node.key.pub` here before the server starts.
- `ca.key`, `server.key`, `operator.key` and `secret` stay on the server's machine. `ca.crt` and `operator.pub` are
  public.
- Clients on other machines connect through `nginx.conf`, which allows what nodes need and nothing else. The server
  itself has no login for operators, so its own port must not be reachable from outside.
"""


_NGINX = """# Clients connect here. Operators work on this machine: the server listens on 127.0.0.1 alone.
# Replace FOLDER with the full path of this folder.
limit_conn_zone $binary_remote_addr zone=plures:1m;

server {{
    listen 443 ssl;
    server_name {host};
    ssl_certificate     FOLDER/server.crt;
    ssl_certificate_key FOLDER/server.key;

    client_max_body_size 8m;  # Flower cuts larger messages into pieces of 5 MB
    limit_conn plures 20;  # connections of one address
    client_header_timeout 20s;  # who connects and says nothing is cut off
    client_body_timeout 60s;
    send_timeout 60s;
    keepalive_timeout 60s;
    proxy_buffering off;
    proxy_request_buffering off;

    location /v1/fleet/ {{
        proxy_pass https://127.0.0.1:{port};
        proxy_ssl_trusted_certificate FOLDER/ca.crt;
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
        proxy_set_header Host $host;
        proxy_read_timeout 300s;
    }}

    location / {{
        return 403;
    }}
}}
"""
