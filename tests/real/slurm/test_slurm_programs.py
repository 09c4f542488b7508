"""Where programs start on a real cluster: as on this machine (tests/plugin/test_plugin_programs.py)."""

from program_folders import write_programs


def test_a_program_starts_in_a_new_folder_and_finds_what_lies_beside_its_test(suite):
    write_programs(suite.folder)
    suite.run("deep", "--mlhpc-pack").expect(0, passed=4)
    assert list(suite.folder.glob("**/made")) == []
