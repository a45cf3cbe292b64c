"""Makes certificates for tests with the openssl command: authorities, servers, clients, and a revocation list."""

import subprocess
from pathlib import Path

CA = """
[ca]
default_ca = own
[own]
database = {folder}/index.txt
default_md = sha256
default_crl_days = 30
"""
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


def authority(folder: Path, name: str) -> None:
    """Write a self-signed ``name``.pem and its ``name``.key."""
    openssl("req", "-x509", *CURVE, "-nodes", "-subj", f"/CN={name}", "-days", 30, "-keyout", folder / f"{name}.key",
            "-out", folder / f"{name}.pem")  # fmt: skip


def certificate(folder: Path, name: str, by: str, password: str = "") -> None:
    """Write ``name``.pem, signed by the authority ``by``, and ``name``.key, encrypted if a password is given."""
    secret = ("-passout", f"pass:{password}") if password else ("-nodes",)
    asked = folder / f"{name}.csr"
    openssl("req", *CURVE, *secret, "-subj", f"/CN={name}", "-keyout", folder / f"{name}.key", "-out", asked)
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    openssl("x509", "-req", "-in", asked, "-CA", folder / f"{by}.pem", "-CAkey", folder / f"{by}.key", "-days", 30,
            "-CAcreateserial", "-extfile", folder / "names", "-out", folder / f"{name}.pem")  # fmt: skip


def revoke(folder: Path, name: str, by: str) -> None:
    """Write crl.pem, a revocation list with this certificate."""
    (folder / "index.txt").touch()
    (folder / "ca.cnf").write_text(CA.format(folder=folder))
    common = ("ca", "-config", folder / "ca.cnf", "-cert", folder / f"{by}.pem", "-keyfile", folder / f"{by}.key")
    openssl(*common, "-revoke", folder / f"{name}.pem")
    openssl(*common, "-gencrl", "-out", folder / "crl.pem")
