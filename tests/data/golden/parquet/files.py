#!/usr/bin/env python3
"""Writes the Parquet files of tests/data/files.rs next to itself: `python3 files.py`, with pyarrow (26.0)."""
import datetime
import decimal
import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

HERE = pathlib.Path(__file__).parent

# One file in every codec that pyarrow writes: zstd and snappy have had files before.
words = pa.table({"text": ["one", "two", "three"] * 20})
for codec in ["gzip", "brotli", "lz4", "snappy", "zstd"]:
    pq.write_table(words, HERE / f"codec_{codec}.parquet", compression=codec)

# A column of every type next to a text.
message = pa.struct([
    ("role", pa.string()),
    ("content", pa.large_string()),
    ("meta", pa.map_(pa.string(), pa.int64())),
    ("at", pa.timestamp("ns")),
])
messages = [[
    {"role": "user", "content": "a", "meta": [("k", 1), ("l", None)], "at": 1},
    {"role": "assistant", "content": "b", "meta": None, "at": None},
]] * 3
columns = {
    "text": pa.array(["x", "y", "z"]),
    "messages": pa.array(messages, pa.list_(message)),
    "map": pa.array([[("a", 1), ("b", None)], [], None], pa.map_(pa.string(), pa.int64())),
    "decimal": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("-2.00")]),
    "decimal256": pa.array([decimal.Decimal("1.10"), None, None], pa.decimal256(60, 2)),
    "timestamp_ns": pa.array([1, None, 2], pa.timestamp("ns")),
    "timestamp_us": pa.array([1, None, 2], pa.timestamp("us", tz="UTC")),
    "timestamp_ms": pa.array([1, None, 2**62], pa.timestamp("ms")),
    "date": pa.array([datetime.date(2024, 1, 1), None, None]),
    "time": pa.array([1, None, 2], pa.time64("us")),
    "duration": pa.array([1, None, 2], pa.duration("s")),
    "binary": pa.array([b"\xff", b"a", None]),
    "fixed": pa.array([b"\xff1", b"ab", None], pa.binary(2)),
    "large": pa.array(["a", None, "c"], pa.large_string()),
    "view": pa.array(["a", None, "c"], pa.string_view()),
    "words": pa.array(["a", "b", "a"]).dictionary_encode(),
    "large_list": pa.array([["a"], None, [None]], pa.large_list(pa.string())),
    "fixed_list": pa.array([[1, 2], [3, 4], None], pa.list_(pa.int32(), 2)),
    "lists": pa.array([[[1], []], [None], None], pa.list_(pa.list_(pa.int64()))),
    "structs": pa.array([[{"x": "a"}], [None, {"x": None}], None]),
    "uint32": pa.array([1, None, 2**32 - 1], pa.uint32()),
    "uint64": pa.array([1, None, 2**64 - 1], pa.uint64()),
    "int8": pa.array([1, None, -3], pa.int8()),
    "float16": pa.array([1.5, float("nan"), None], pa.float16()),
    "float": pa.array([0.5, float("nan"), float("inf")], pa.float32()),
    "bool": pa.array([True, None, False]),
    "null": pa.nulls(3),
}
pq.write_table(pa.table(columns), HERE / "types.parquet", compression="zstd")
pq.write_table(
    pa.table({"int96": columns["timestamp_ns"], "text": columns["text"]}),
    HERE / "int96.parquet",
    use_deprecated_int96_timestamps=True,
)

# Values of several types are JSON (the feature `Json` of datasets 5), next to the rows that they are of.
def tool(kind):
    return {"type": "function", "function": {"name": "f", "parameters": {"a": {"type": kind, "enum": [1, None]}}}}


rows = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "arguments": {"x": 1}}],
     "tools": [tool("integer")], "by": [["k", {"y": [1]}]]},
    {"messages": [{"role": "user", "content": "r"}], "tools": [tool("integer"), tool("text")],
     "by": [["k", "text"], ["l", 2.5]]},
]


def texts(values):
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array([json.dumps(value) for value in values]))


def offsets(lists):
    return pa.array([0] + [sum(len(one) for one in lists[:i + 1]) for i in range(len(lists))], pa.int32())


messages, tools, maps = ([row[key] for row in rows] for key in ("messages", "tools", "by"))
every = [tool for one in tools for tool in one]
parameters = pa.StructArray.from_arrays([texts([tool["function"]["parameters"]["a"] for tool in every])], ["a"])
function = pa.StructArray.from_arrays([pa.array([tool["function"]["name"] for tool in every]), parameters], ["name", "parameters"])
structs = pa.StructArray.from_arrays([pa.array([tool["type"] for tool in every]), function], ["type", "function"])
entries = [entry for one in maps for entry in one]
table = pa.table({
    "messages": pa.ListArray.from_arrays(offsets(messages), texts([message for one in messages for message in one])),
    "tools": pa.ListArray.from_arrays(offsets(tools), structs),
    "by": pa.MapArray.from_arrays(offsets(maps), pa.array([key for key, _ in entries]), texts([value for _, value in entries])),
})
pq.write_table(table, HERE / "json.parquet")
(HERE / "json.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

# One row a file, whose meaning another column changes than the one that is learned.
turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
other = [turns[0], {"role": "assistant", "content": "b"}]
ids = {"input_ids": [1, 2, 3, 4]}
(HERE / "columns").mkdir(exist_ok=True)
for name, row in {
    "system": {"id": 1, "system_prompt": "s", "q": "q", "a": "a"},
    "system_pair": {"system_prompt": "s", "prompt": "q", "chosen": "a", "rejected": "b"},
    "undesired": {"prompt": "q", "completion": "a", "label": False},
    "undesired_messages": {"messages": turns, "label": False},
    "image": {"conversations": [{"from": "human", "value": "<image>q"}, {"from": "gpt", "value": "a"}],
              "image": {"bytes": b"\xff\xd8", "path": "a.jpg"}},
    "no_image": {"messages": turns, "image": {"bytes": None, "path": None}, "videos": []},
    "image_pair": {"prompt": "q", "chosen": "a", "rejected": "b", "images": ["a.jpg"]},
    "packed": ids | {"cu_seqlens": [0, 2, 4]},
    "packed_segments": ids | {"segment_ids": [0, 0, 1, 1]},
    "weights": ids | {"token_weights": [0.0, 1.0, 1.0, 1.0]},
    "swift_pair": {"messages": turns, "rejected_response": "b"},
    "swift_messages": {"messages": turns, "rejected_messages": other},
    "openai_pair": {"input": {"messages": turns[:1], "tools": []}, "preferred_output": turns[1:],
                    "non_preferred_output": other[1:]},
    "unnamed": {"task": "t", "problem": "why", "solution": "a"},
    "talk": {"id": "x", "dialogue": turns},
}.items():
    pq.write_table(pa.Table.from_pylist([row]), HERE / "columns" / f"{name}.parquet")
    plain = {key: {"bytes": "...", "path": "a.jpg"} if key == "image" and value["path"] else value
             for key, value in row.items()}
    (HERE / "columns" / f"{name}.jsonl").write_text(json.dumps(plain) + "\n")
