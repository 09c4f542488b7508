"""The picture of docs/architecture.md shows the packages as they are."""

from architecture_picture import ABOUT, PICTURE, arrows, draw
from test_import_order import ORDER


def test_it_shows_each_package_and_who_imports_whom_now(house):
    """``make architecture`` draws it anew."""
    assert tuple(ABOUT) == ORDER
    assert PICTURE.read_text(encoding="utf-8") == draw(arrows(house.imports))


def test_an_arrow_that_follows_from_two_others_is_left_out():
    found = arrows({
        "pytest_mlhpc/cli/a.py": ["pytest_mlhpc/store/b.py", "pytest_mlhpc/errors.py"],
        "pytest_mlhpc/store/b.py": ["pytest_mlhpc/errors.py", "pytest_mlhpc/store/c.py"],
    })  # fmt: skip
    assert {name: others for name, others in found.items() if others} == {
        "cli": {"store"},
        "store": {"errors"},
    }
