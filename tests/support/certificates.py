"""Makes certificates for tests with the openssl command: authorities, servers, clients, and a revocation list."""

import subprocess
from pathlib import Path

CA_CONFIG = """
[ca]
default_ca = own
[own]
database = {folder}/index.txt
default_md = sha256
default_crl_days = 30
"""
KEY_OPTIONS = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def run_openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def make_authority(folder: Path, name: str) -> None:
    """Write a self-signed ``name``.pem and its ``name``.key."""
    run_openssl(
        "req",
        "-x509",
        *KEY_OPTIONS,
        "-nodes",
        "-subj",
        f"/CN={name}",
        "-days",
        30,
        "-keyout",
        folder / f"{name}.key",
        "-out",
        folder / f"{name}.pem",
    )


def make_certificate(folder: Path, name: str, issuer: str, password: str = "") -> None:
    """Write ``name``.pem, signed by the authority ``by``, and ``name``.key, encrypted if a password is given."""
    secret = ("-passout", f"pass:{password}") if password else ("-nodes",)
    signing_request = folder / f"{name}.csr"
    run_openssl(
        "req", *KEY_OPTIONS, *secret, "-subj", f"/CN={name}", "-keyout", folder / f"{name}.key", "-out", signing_request
    )
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    run_openssl(
        "x509",
        "-req",
        "-in",
        signing_request,
        "-CA",
        folder / f"{issuer}.pem",
        "-CAkey",
        folder / f"{issuer}.key",
        "-days",
        30,
        "-CAcreateserial",
        "-extfile",
        folder / "names",
        "-out",
        folder / f"{name}.pem",
    )


def revoke_certificate(folder: Path, name: str, issuer: str) -> None:
    """Write crl.pem, a revocation list with this certificate."""
    (folder / "index.txt").touch()
    (folder / "ca.cnf").write_text(CA_CONFIG.format(folder=folder))
    common = (
        "ca",
        "-config",
        folder / "ca.cnf",
        "-cert",
        folder / f"{issuer}.pem",
        "-keyfile",
        folder / f"{issuer}.key",
    )
    run_openssl(*common, "-revoke", folder / f"{name}.pem")
    run_openssl(*common, "-gencrl", "-out", folder / "crl.pem")
