"""Writes checks.json: what transformers' Jinja makes of tests, slices, predicates and line ends, for tests/data/checks.rs.

Needs: pip install transformers. Run: python checks.py
"""
import json
from pathlib import Path

from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

VALUES = [None, True, False, 0, 3, -2, 1.5, "", "abc", "Abc Def", "  x ", "ABC", "12", "a,b", [], [1, 2], ["b", "a", "C"], {}, {"b": 1, "a": 2}, [None, 1, ""],
          [True, 2, 1.0], ["b", "B", "a"], ["B", "b"], [[2, 1], [1]], [{"a": 1}, {"a": 1}], [None, None], [None], "12 ", "-0x1f", "1e3", "1_000", "_1", "nan", "1.9", "101", "0b11", "+5", "--5", 1e20,
          "it's o'neil (mc-donald) [x] <y> {z} \u00e9t\u00e9 3d \u01c6a"]
TESTS = "defined undefined none boolean true false integer float number string mapping sequence iterable callable lower upper odd even".split()
SLICES = ["1:", ":-1", "::-1", "::2", "-2:", "::-2", "5:", ":5", "-9:2", "1:0", "2:0:-1", "-1::-1", ":0:-1", "1:9:3"]
METHODS = [f"v.{name}()" for name in "isdigit isalpha isalnum isnumeric isspace isupper islower isascii".split()]
ORDERED = ["v | sort | list", "v | sort(case_sensitive=true) | list", "v | sort(reverse=true) | list", "v | unique | list", "v | unique(true) | list", "v | min", "v | max",
           "v | min(case_sensitive=true)", "v | max(case_sensitive=true)", "v | reverse | list", "v | title", "v | int", "v | int(7)", "v | int(default=none)", "v | float",
           "v | float('x')", "v | int(0, 16)", "v | int(base=2)", "[v, 'x'] | sort", "[v, v] | unique | list", "[v, 1] | min", "[{'a': v, 'b': 1}, {'a': v, 'b': 0}] | sort(attribute='a,b')",
           "[{'a': {'c': v}}, {'a': {'c': v}}] | unique(attribute='a.c') | list | length", "[{'a': v}] | max(attribute='a')", "u | int", "u | sort", "u | min", "u | unique | list"]
NONE_FIRST = ["tools is iterable and tools | length > 0", "u is iterable", "u is sequence", "v is iterable and v is not string and v is not mapping"]
LINES = ["a\r\nb{{ v }}\r\n{% if v %}\r\nc\r\n{% endif %}\r\nd", "a\rb", "{{ 'x\r\ny' }}"]
THOUGHTS = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.items() | list }};{% endfor %}"
NAMES = [{}, {"reasoning_content": "r"}, {"thinking": "t"}, {"reasoning": "s"}, {"reasoning_content": "r", "thinking": "t"}, {"thinking": None, "reasoning": "s"},
         {"reasoning_content": None, "thinking": "t"}, {"reasoning_content": ""}]


def rendered(template, messages):
    try:
        return render_jinja_template([_normalize_chat_messages(messages)], chat_template=template)[0][0]
    except Exception:
        return None


def main():
    expressions = [f"v is {name}" for name in TESTS] + [f"v[{part}]" for part in SLICES] + METHODS + NONE_FIRST + ORDERED
    sources = ["{{ " + e + " }}" for e in expressions] + LINES
    values = [[json.dumps(value), [rendered("{% set v = messages[0].w.v %}" + source, [{"role": "user", "w": {"v": value}}]) for source in sources]] for value in VALUES]
    chats = [[{"role": "assistant", "content": "a", **names}] for names in NAMES]
    thoughts = [[chat, rendered(THOUGHTS, chat)] for chat in chats]
    table = {"sources": sources, "values": values, "template": THOUGHTS, "thoughts": thoughts}
    Path(__file__).with_suffix(".json").write_text(json.dumps(table, indent=0, ensure_ascii=False) + "\n")


main()
