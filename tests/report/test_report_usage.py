"""What commands of reports refuse, and where it says the nearest word."""

from cli_calls import refusals


@refusals(__file__)
def test_a_usage_error_says_what_is_wrong(recorded, refused, tmp_path, monkeypatch, command, why):  # noqa: PLR0917
    monkeypatch.chdir(tmp_path)
    recorded(
        "alpha:x", benchmark="resnet50[bagging=[2,2] global_batch=8] devices=1 name=a nodes=1 preset=smoke"
    )
    assert why in refused(command)
