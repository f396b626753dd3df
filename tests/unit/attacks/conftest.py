"""The archive that the attacks alter."""

from __future__ import annotations

import pytest

from tests.unit.attacks.archives import Members, read_members, save_victim


@pytest.fixture(scope="session")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Members:
    """The members of the archive of a small program, as torch saves it."""
    path = tmp_path_factory.mktemp("victim") / "victim.pt2"
    save_victim(path)
    return read_members(path)
