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
