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
TEXTS = ["v.zfill(6)", "v.ljust(6) ~ '|'", "v.rjust(6, '*')", "v.center(7)", "v.center(8, '-') ~ '|'", "v.ljust(3, 'ab')", "v.index('b')", "v.rindex('b')", "v.find('b', 1)",
         "v.find('', 9)", "v.find('c', -2)", "v.rfind('b', 0, 2)", "v.count('b', 1)", "v.count('')", "v.count('', 1, -1)", "v.startswith('b', 1)", "v.endswith('b', 0, 2)",
         "v.startswith('', 9)", "v.startswith(('x', 'a'))", "v.swapcase()", "v.casefold()", "v.isdecimal()", "v.istitle()", "(v ~ '\\ta\\t').expandtabs()", "'a\\tb'.expandtabs(4)",
         "'{a}{b}'.format_map(v)", "v.index(1)", "v.index(1, 1)", "v.index('zz')", "v.copy()", "v | truncate(3)", "v | truncate(4, true, '..', 0)", "v | truncate(9, end='', leeway=0)",
         "v | truncate(length=2)", "v | wordcount", "v | center(9)", "v | center ~ '|'", "v | urlencode", "{'a b': v} | urlencode", "v | e | forceescape", "v | xmlattr",
         "{'a': v, 'b': none, 'c': u} | xmlattr(false)", "{'a b': v} | xmlattr", "(v ~ '<') | e + '<'", "'<' + (v ~ '<') | e", "((v ~ '<') | e) + '<' ~ v", "'<' + ((v ~ '<') | safe)",
         "v + v", "v + 1", "[v] + [1]", "v + [1]", "v < 1", "1 >= v", "v < 'b'", "v <= v", "range(v)", "range(1, v, 2)", "range(v) | list", "range(v) | length", "range(3)[v]",
         "[{'a': v}, {'a': v}, {'a': v, 'b': 2}] | groupby('a') | list", "v and none", "[v] * 2", "v * 2",
         "[{'k': 'B', 'v': v}, {'k': 'a', 'v': 1}] | groupby('k') | map(attribute='grouper') | list"]
OPERATED = [f"v {operator} {number}" for operator in ["-", "*", "/", "//", "%", "**"] for number in [3, -3, 0, "true"]] + ["v // 0.7", "v % -0.7"]
OPERATED += [f"{number} {operator} v" for operator in ["-", "*", "/", "//", "%"] for number in [7, -7, 0.7]] + ["7 ** v", "0.7 ** v"]
OPERATED += ["v.partition('b')", "v.rpartition('b')", "v.title()", "[v, v] | sum", "[{'a': v}, {'a': 2}] | sum(attribute='a')", "[v] | sum(start=0.5)", "[v, 1] | sum('a')"]
ALONE = ["{{ true and none }}", "{{ 0 and 1 }}|{{ 1 and 0.5 and '' }}|{{ true and (1 or 2) }}", "{{ 'a' * 3 }}|{{ 3 * 'ab' }}|{{ 2 * 3 * 4 }}|{{ [1] * 2 }}|{{ (2 + 1) * 2 }}|{{ -2 * 3 }}",
         "{% if true and none %}a{% else %}b{% endif %}", "{{ range(3) }}|{{ range(1, 5) }}|{{ range(5, 0, -2) }}|{{ range(0) | list }}|{% for i in range(2) %}{{ i }}{% endfor %}",
         "{% macro m(x, y=x) %}{{ y }}{% endmacro %}{{ m(3) }}{{ m(3, 4) }}{{ m(3, y=5) }}", "{% macro m(x, y=x ~ '!', z=[y, 1]) -%}\n  {{ z }}\n{%- endmacro %}{{ m(3) }}|{{ m(3, z=1) }}",
         "{% macro m(x, y=(x, 2)|length, z='x') %}\n{{ y }}{{ z }}\n{% endmacro %}\n{{ m('x') }}", "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}",
         "{% set j = joiner('|') %}{{ j() }}a{{ j() }}b{{ j() }}c{% set k = joiner() %}{{ k() }}{{ k() }}", "{% for k, g in [{'a': 1, 'b': 2}] | groupby('a') %}{{ k }}{{ g }}{% endfor %}",
         "{{ 5 / 2 }}|{{ -7 // 2 }}|{{ 7 // -2 }}|{{ -7 % 3 }}|{{ 7 % -2 }}|{{ 7.5 // -2 }}|{{ 6 / 3 }}|{{ '%d' % 3 }}|{{ 1 - 0.5 }}", "{{ 5 / 0 }}", "{{ 5 // 0 }}", "{{ 5 % 0 }}", "{{ 'a' * -1 }}|"]
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
    sources = ["{{ " + e + " }}" for e in expressions + TEXTS + OPERATED] + LINES
    values = [[json.dumps(value), [rendered("{% set v = messages[0].w.v %}" + source, [{"role": "user", "w": {"v": value}}]) for source in sources]] for value in VALUES]
    chats = [[{"role": "assistant", "content": "a", **names}] for names in NAMES]
    thoughts = [[chat, rendered(THOUGHTS, chat)] for chat in chats]
    alone = [[source, rendered(source, [{"role": "user"}])] for source in ALONE]
    table = {"alone": alone, "sources": sources, "values": values, "template": THOUGHTS, "thoughts": thoughts}
    Path(__file__).with_suffix(".json").write_text(json.dumps(table, indent=0, ensure_ascii=False) + "\n")


main()
