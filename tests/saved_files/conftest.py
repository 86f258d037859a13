"""The saved files, as they were written, in a folder."""

import zipfile

import pytest

from saved_files.expected import PLACE


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    with zipfile.ZipFile(PLACE / "files.zip") as archive:
        archive.extractall(folder)
    return folder
