"""Which recipe a record is of: rows of different commands are the same if they set the same."""

import json

from octavo.errors import ConfigError
from octavo.measure import rows as grammar
from octavo.measure.records import Measurement


def row_name(record: Measurement) -> str:
    """What a record calls its recipe."""
    return str(record.case.get("row", record.case.get("recipe", record.impl)))


def recipe_key(record: Measurement, dialect: grammar.Dialect) -> str | None:
    """What a record's row sets, whatever it is called; None if it quantizes nothing to FP8."""
    name = row_name(record)
    text = name.removeprefix("fp8 ")
    if ".toml" in text or ".json" in text:  # the file may be another by now
        return f"{text} {record.case.get('recipe_digest', '')}"
    try:
        row = grammar.parse_row(text, dialect)
        kv = None if row.kv_cache is None else dict(row.kv_cache)
    except (ConfigError, ValueError):  # of a record that somebody wrote by hand
        return name if record.baseline not in (None, name) else None
    if row.is_plain or row.fields.get("vision_attention") == {"dtype": "bf16"}:
        return None
    if kv is not None:  # what ran: random weights are calibrated, whatever the row says
        kv |= {
            name: record.case[name] for name in ("granularity", "scaling") if name in record.case
        }
    fields = {**row.fields, "kv_cache": kv, "linear": str(row.linear)}
    return json.dumps(fields, sort_keys=True, default=str)


def dtype_of(record: Measurement) -> str | None:
    """The dtype of the unquantized model, by one name; None if the record does not say it."""
    name = record.case.get("dtype")
    return None if name is None else grammar.PLAIN.get(str(name)) or str(name)
