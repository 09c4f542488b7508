"""Where programs start on this machine; tests/real/slurm has the same of a cluster."""

from program_folders import write_programs


def test_a_program_starts_in_a_new_folder_and_finds_what_lies_beside_its_test(suite):
    write_programs(suite.folder)
    suite.run("deep").assert_outcomes(passed=4)
    assert sorted(path.name for path in suite.folder.glob("**/made")) == []


def test_a_folder_that_a_program_left_empty_does_not_stay(suite):
    suite.write("@job()\ndef test_it(run): pass\n")
    suite.run().assert_outcomes(passed=1)
    (record,) = suite.records()
    assert list(suite.state.glob(f"runs/*/*/{record['id']}")) == []


def test_a_program_that_is_nowhere_is_named_with_where_it_was_looked_for(suite):
    suite.write('@program("./bench", RATE)\ndef test_it(run): pass\n')
    suite.run().expect(
        1,
        "*cannot start './bench': No such file or directory (looked for beside the test, and in the new folder*",
    )
