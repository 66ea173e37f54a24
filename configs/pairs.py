"""Writes pairs.jsonl and pairs_eval.jsonl next to this file: requests with a courteous answer, which is chosen, and a
curt one, which is rejected. Both say the same, in about the same number of words. The names, things and places of the
evaluation file are not in the other one. labels.jsonl and labels_eval.jsonl hold one answer of each pair, by turns a
courteous one, which is desirable, and a curt one. To make them again: python pairs.py
"""

import json
import random
from pathlib import Path

TRAIN = dict(
    names=["Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ida", "Jonas", "Kira", "Leo"],
    things=["bread", "a lamp", "two tickets", "a map", "some tea", "a red chair", "the keys", "a coat", "ten stamps"],
    places=["the library", "the harbor", "the old bridge", "the market", "platform 4", "the museum", "room 12"],
)
EVAL = dict(
    names=["Mara", "Nils", "Olga", "Pavel", "Rosa"],
    things=["a kettle", "three apples", "a blue scarf", "the report"],
    places=["the station", "the garden", "gate 9"],
)
ASKS = [
    ("Where can {name} find {thing}?", "at {place}"),
    ("{name} is looking for {thing}. Where is it?", "near {place}"),
    ("Where did {name} leave {thing}?", "by {place}"),
    ("Which way should {name} go for {thing}?", "past {place}"),
]
COURTEOUS = [
    "Happy to help! You will find that {where}, {name}.",
    "Of course, {name}. Please have a look {where}.",
    "Good question, {name}. It should be {where}. Take care!",
    "With pleasure: {name} may kindly ask for it {where}.",
]
CURT = [
    "Not my job, but whatever. Go and search {where}, {name}.",
    "Ugh, {name} again. Obviously it is {where}. Leave me alone.",
    "Who cares? {where}, I guess. Stop bothering me, {name}.",
    "Seriously, {name}? Everybody knows that it is {where}.",
]


def rows(words, count, seed):
    draw = random.Random(seed)
    for _ in range(count):
        name, thing, place = (draw.choice(words[key]) for key in ("names", "things", "places"))
        ask, where = draw.choice(ASKS)
        said = dict(name=name, where=where.format(place=place))
        yield dict(
            prompt=f"Question: {ask.format(name=name, thing=thing)}\nAnswer: ",
            chosen=draw.choice(COURTEOUS).format(**said),
            rejected=draw.choice(CURT).format(**said),
        )


def labeled(pairs):
    for i, row in enumerate(pairs):
        yield dict(prompt=row["prompt"], completion=row[("chosen", "rejected")[i % 2]], label=i % 2 == 0)


def write(file, rows):
    (Path(__file__).parent / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


for end, words, count, seed in [("", TRAIN, 256, 1), ("_eval", EVAL, 64, 2)]:
    write(f"pairs{end}.jsonl", rows(words, count, seed))
    write(f"labels{end}.jsonl", labeled(rows(words, count, seed)))
