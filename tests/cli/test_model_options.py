"""Options of an engine become its settings."""

import pytest
import typer
from typer.testing import CliRunner

from octavo.cli.model_options import EngineOptions, RowOptions, SubjectOptions
from octavo.cli.options import takes_settings
from octavo.serving.engine.settings import EngineSettings


def parse(*args):
    seen = []
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command()
    @takes_settings
    def command(subject: SubjectOptions, rows: RowOptions, engine: EngineOptions) -> None:
        seen.extend([subject, rows, engine])

    assert CliRunner().invoke(app, args).exit_code == 0
    return seen


def test_defaults_are_those_of_the_engine():
    subject, rows, engine = parse()
    assert (subject, rows, engine) == (SubjectOptions(), RowOptions(), EngineOptions())
    assert engine.settings() == EngineSettings()
    assert rows.names == ("auto", "fp8")


def test_flags():
    text = (
        "some/model --dtype float32 --layers 2 --kv-cache-dtype fp8 --kv-cache-dtype auto "
        "--kv-cache-dtype-skip-layers 0-1 --gpu-memory-utilization 0.5 --num-pages 3 "
        "--page-size 16 --enforce-eager --compile"
    )
    subject, rows, engine = parse(*text.split())
    assert subject == SubjectOptions(model="some/model", dtype="float32", layers=2)
    assert rows == RowOptions(kv_cache_dtype=("fp8", "auto"), skip_layers=("0-1",))
    assert engine.settings() == EngineSettings(
        memory_fraction=0.5, num_pages=3, page_size=16, cuda_graphs=False, compile=True
    )


@pytest.mark.parametrize(
    "num_seqs, num_tokens, limits",
    [(None, None, (256, 2048)), (None, 64, (64, 64)), (4096, None, (4096, 4096)), (8, 16, (8, 16))],
)
def test_the_limit_that_is_left_out_fits_the_other(num_seqs, num_tokens, limits):
    options = EngineOptions(max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)
    made = options.settings()
    assert (made.max_num_seqs, made.max_num_batched_tokens) == limits


def test_a_command_adds_fields_of_its_own():
    made = EngineOptions(max_num_seqs=4).settings(max_num_seqs=3000, max_context=8192)
    assert made == EngineSettings(max_num_seqs=3000, max_num_batched_tokens=3000, max_context=8192)
