"""PAYLOAD, standard library only. Paths as tests and systems write them, ``$SCRATCH/data``: the variables are each node's own."""

from __future__ import annotations

import socket
import string
from pathlib import Path
from typing import Mapping


def filled(path: str, environ: Mapping[str, str]) -> Path:
    """Return *path* with ``$NAME`` and ``${NAME}`` of *environ* and a leading ``~`` filled in; ``$$`` is a dollar sign.

    Raises:
        ValueError: a variable is not set here, a ``$`` names none, a ``~`` nobody's home; says what to do.
    """
    try:
        return Path(string.Template(path).substitute(environ)).expanduser()
    except KeyError as error:
        text = f"{error.args[0]} is not set in the run's environment on {socket.gethostname()}; name it in `variables:`"
    except ValueError:
        text = "a $ must be followed by a name, or doubled"
    except RuntimeError:  # of expanduser
        text = f"{socket.gethostname()} knows no home of that user"
    raise ValueError(text)
