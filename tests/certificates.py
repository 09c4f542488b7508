"""A certificate for 127.0.0.1 that nobody trusts but who is told to."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


def certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Make one. Return what a server takes, and the file that its clients trust."""
    key, trusted = folder / "key.pem", folder / "certificate.pem"
    words = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
        "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(trusted),
    ]  # fmt: skip
    subprocess.run(words, check=True, capture_output=True, timeout=3000)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(trusted, key)
    return server, trusted


def chain(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Make one of an authority, as some clusters have it: without key identifiers and key usage. Return the same two."""
    extensions = {"ca": "basicConstraints=critical,CA:TRUE", "leaf": "subjectAltName=IP:127.0.0.1"}
    for name, line in extensions.items():
        text = f"{line}\nsubjectKeyIdentifier=none\nauthorityKeyIdentifier=none\n"
        (folder / f"{name}.ext").write_text(text, encoding="ascii")
        new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        new += ["-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"]
        signed = ["-signkey", "ca.key"] if name == "ca" else ["-CA", "ca.crt", "-CAkey", "ca.key"]
        sign = ["openssl", "x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.crt", "-days", "1"]
        for words in (new, [*sign, "-set_serial", str(len(name)), "-extfile", f"{name}.ext", *signed]):
            subprocess.run(words, check=True, cwd=folder, capture_output=True, timeout=3000)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "leaf.crt", folder / "leaf.key")
    return server, folder / "ca.crt"
