"""Makes table.json: JSON values in templates, as Jinja renders them in the environment of transformers
(`_compile_jinja_template`). Needs jinja2 alone. `null` stands for an error."""
import json
import random
from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


ENV = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
ENV.filters["tojson"] = tojson
ENV.globals["raise_exception"] = raise_exception

# On every value.
COMMON = [
    "{{ v }}",
    "{{ '[' ~ v ~ ']' }}",
    "{{ v | string }}",
    "{{ [v] }}{{ {'k': v} ~ '' }}",
    "{{ '%s' | format(v) }}",
    "{{ v | tojson }}",
]
# In turn.
MORE = [
    "{{ '%s %s' % (v, 1) }}",
    "{{ '%s' % v }}",
    "{{ '%r|%10s|%-10s|%.3s|%%' | format(v, v, v, v) }}",
    "{{ '%(a)s %(b)r' | format(a=v, b=v) }}",
    "{{ '{}'.format(v) }}",
    "{{ '{0} {0!r} {x!s:>8} {{}}'.format(v, x=v) }}",
    "{{ '{:>7}|{:<7}'.format(v, v) }}",
    "{{ '{a[0]}'.format(a=[v]) }}",
    "{{ '%d %5d %05d %x' | format(v, v, v, v) }}",
    "{{ '%.2f %8.3e %g' | format(v, v, v) }}",
    "{{ '{:d} {:,} {:+}'.format(v, v, v) }}",
    "{{ '{:.2f} {:.3g} {:.3}'.format(v, v, v) }}",
    "{{ v + '' }}",
    "{{ 'a' + v }}",
    "{{ v | upper }}{{ v | lower }}{{ v | capitalize }}",
    "{{ v | trim }}|",
    "{{ v | replace('e', v) }}",
    "{{ v | replace('', '-', 2) }}",
    "{{ 'xx' | replace('x', v) }}",
    "{{ v | join(', ') }}",
    "{{ [v, 1, v] | join(v) }}",
    "{{ [{'n': v}, {'n': 'z'}] | join('; ', attribute='n') }}",
    "{{ ', '.join([v, 'x']) }}",
    "{{ v | safe }}{{ v | e }}",
    "{{ v | indent }}",
    "{{ 'a\\n\\nb' | indent(2, true) }}{{ [v] | tojson(indent=2) | indent(2) }}",
    "{{ v in 'True, 1, None, abc' }}",
    "{{ v in [1, 'abc', none, 1.5] }}",
    "{{ v in {'abc': 1} }}",
    "{{ {v: v} }}",
    "{{ {v: v} | tojson }}",
    "{{ [v, v] | tojson(indent=4) }}",
    "{{ {'b': v, 'a': [v]} | tojson(indent=2, separators=(',', ':'), sort_keys=true) }}",
    "{{ v | tojson(ensure_ascii=true) }}",
    "{{ v | tojson(false, 1) }}",
    "{{ v | tojson(indent='\\t') }}",
    "{{ v | items | list }}",
    "{{ v.items() }}{{ v.keys() }}{{ v.values() | list }}",
    "{{ v | dictsort }}",
    "{% for k, x in v.items() %}{{ k }}={{ x }};{% endfor %}",
    "{% for x in v %}{{ x }},{% endfor %}",
    "{{ v | list }}",
    "{{ v | length }}",
    "{{ [v, v] | map('string') | list }}{{ [v] | map('tojson') | join }}",
    "{% set x %}{{ v }}!{% endset %}{{ x }}{{ x | length }}",
    "{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(v) ~ f(a=v) }}",
    "{{ v | default('none') }}{{ v is defined }}",
    "{{ [v.nothing, v['nothing']] }}",
    "{{ (v | string | length) ~ (v ~ v) | length }}",
    "{{ v % 7 }}",
    "{{ v * 2 }}",
]
# Without a value, which is then undefined.
ALONE = [
    "{{ u }}|{{ u ~ 'a' }}|{{ u | string }}|{{ [u] }}|{{ u | upper }}|{{ u | trim }}|{{ u | join(',') }}",
    "{{ '%s' | format(u) }}|{{ '{}'.format(u) }}|{{ '%s' % u }}|{{ u | length }}|{{ u | items | list }}|{{ u in [1] }}",
    "{{ u | tojson }}",
    "{{ [u] | tojson }}",
    "{{ u + 'a' }}",
    "{{ 'a' + u }}",
    "{{ u in 'abc' }}",
    "{{ 'abc' in u }}",
    "{{ u.x }}",
    "{{ u | indent }}",
    "{{ '{:5}'.format(u) }}",
    "{{ ('nan' | float) ~ [('inf' | float), -('inf' | float)] }}{{ [('nan' | float), -('inf' | float)] | tojson }}",
    "{{ {1: 1, 1.5: 2, none: 3} | tojson }}",
    "{{ {'a': 1}.items() | list }}{{ {'b': 2, 'a': 1} | dictsort | list }}",
    "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}{{ {1: 1, 'a': 2} | tojson(sort_keys=true) }}",
    "{{ {'a': 1}.items() | tojson }}",
    "{% set a, b = 7, 3 %}{{ a % b }} {{ a % -b }} {{ -a % b }} {{ (a + 0.5) % b }} {{ -(a + 0.5) % b }} {{ a % -1.5 }}",
    "{{ 1 % 0 }}",
    "{% for c in 'añc' %}{{ c }}{{ loop.length }}{{ loop.revindex }}{{ ',' if not loop.last }}{% endfor %}"
    "{% for c in 'abc'[1:] | reverse %}{{ c }}{{ loop.last }}{% endfor %}{% for c in '' %}{% else %}none{% endfor %}",
    "{{ '%s' }}{{ '%d%%' | format(3.9) }}{{ '%*d' | format(6, 42) }}{{ '%c' | format('x') }}",
    "{{ '%s' | format }}",
    "{{ '%s' | format(1, 2) }}",
    "{{ '%(a)s' | format(b=1) }}",
    "{{ '%' | format(1) }}",
    "{{ '{} {1}'.format(1) }}",
    "{{ '{'.format(1) }}",
    "{{ '}'.format(1) }}",
    "{{ '{:>{w}}|{:{}}'.format('a', 'b', 4, w=3) }}",
    "{{ '{0.a} {0[a]} {x.a.b}'.format({'a': 1}, x={'a': {'b': [none]}}) }}",
    "{{ '{:*^9}|{:>4.2}|{:05}|{:>08.1f}|{:_}'.format('h\u00e9', '\u6f22\u5b57\u6f22', 'a', 2.25, 12345) }}",
    "{{ '{:5}|{:<5}|{:^9}|{:+}'.format(1.0, true, 1e16, 1) }}",
    "{{ 'a\\r\\nb\\x0bc\\n'.splitlines() }}{{ 'a\\r\\nb\\n\\n'.splitlines(true) }}",
    "{% for t in none %}{% endfor %}",
    "{{ none | list }}",
    "{{ {[1]: 1} }}",
    "{% set d = {} %}{{ [1] in d }}",
    "{{ {}.get([1]) }}",
    "{{ {}.get('a') }}{{ {}.get('a', []) }}",
]
VALUES = [
    "null", "true", "false", "0", "1", "-1", "42", "1234567", "9223372036854775807", "18446744073709551615",
    "-9223372036854775808", "123456789012345678901234567890", "-18446744073709551616",
    "0.0", "-0.0", "0.1", "1.0", "-2.5", "1e-5", "0.0001", "0.00012345", "1e15", "1e16", "123456789012345680.0", "1.5e300",
    "5e-324", "3.141592653589793", "1e22", "100000.0", "2.675", "9007199254740993.0", "1e100", "-1e-7",
    '""', '"abc"', '"it\'s"', '"say \\"hi\\""', '"it\'s \\"both\\""', '"a\\nb\\tc\\rd"', '"back\\\\slash"', '" pad "',
    '"caf\\u00e9 \\u6f22\\u5b57 \\ud83d\\ude00"', '"\\u0000\\u0001\\u001f\\u007f\\u0080\\u00a0\\u00ad"', '"\\u200b\\u2028\\u3000\\ufeff"',
    '"a\\u0301\\u0301"', '"\\ue000\\udbff\\udfff"', '"<b>&</b>"', '"%s {} {{ v }}"', '"True"', '"1"', '"\\f\\b/"',
    "[]", "[1]", '["Mon", "it\'s", true, null]', "[1.0, 1e16, -0.0, 1e-05]", '[[], [[]], {}]', '["\\n", "\\u00e9", "\\""]',
    "{}", '{"loud": true, "note": "a\\nb"}', '{"z": 1, "a": {"y": [2.5, null], "b": "it\'s"}}', '{"": [], "1": {}, "k\\n": "v"}',
    '{"type": "object", "properties": {"items": {"type": "array", "items": {"type": "string"}}, "keys": 1}, "required": ["items"]}',
    '{"abc": "x", "B": 1, "C": null}', '{"b": false, "a": false, "c": [{"x": 1e3}]}',
]


def loaded(text):
    """As serde_json reads numbers: an integer beyond 64 bits is a float."""
    return json.loads(text, parse_int=lambda s: int(s) if -(2**63) <= int(s) < 2**64 else float(s))


def some(rng, depth):
    kinds = ["text", "text", "int", "float", "bool", "none"] + ["list", "dict", "dict"] * (depth > 0)
    match rng.choice(kinds):
        case "text":
            return "".join(rng.choice("ab'\"\\\n\té漢\u200b\x1f {}%<") for _ in range(rng.randrange(6)))
        case "int":
            return rng.choice([rng.randrange(10), rng.randrange(-(2**63), 2**64), -rng.randrange(1000)])
        case "float":
            return rng.choice([rng.random(), rng.uniform(-1, 1) * 10.0 ** rng.randrange(-20, 25), float(rng.randrange(100))])
        case "bool":
            return rng.random() < 0.5
        case "none":
            return None
        case "list":
            return [some(rng, depth - 1) for _ in range(rng.randrange(4))]
        case "dict":
            return {some(rng, 0) if rng.random() < 0 else "".join(rng.choices("abk '\n", k=rng.randrange(4))): some(rng, depth - 1)
                    for _ in range(rng.randrange(4))}


def render(source, **context):
    try:
        return ENV.from_string(source).render(**context)
    except Exception:
        return None


def main():
    rng = random.Random(34)
    texts = VALUES + [json.dumps(some(rng, 3), ensure_ascii=rng.random() < 0.5) for _ in range(140)]
    expressions = COMMON + MORE
    rows, turn = [], 0
    for at, text in enumerate(texts):
        # All on the values above; five in turn on the others.
        which = list(range(len(expressions)))
        if at >= len(VALUES):
            which = list(range(len(COMMON))) + [len(COMMON) + (turn + i) % len(MORE) for i in range(5)]
            turn += 5
        found = [[i, render(expressions[i], v=loaded(text))] for i in which]
        rows.append({"value": text, "rendered": found})
    table = {
        "jinja2": jinja2.__version__, "expressions": expressions,
        "rows": rows, "alone": [[source, render(source)] for source in ALONE],
    }
    lines = [json.dumps(row, separators=(",", ":")) for row in rows]
    head = json.dumps({k: v for k, v in table.items() if k != "rows"}, separators=(",", ":"))
    path = Path(__file__).with_name("table.json")
    path.write_text(head[:-1] + ',"rows":[\n' + ",\n".join(lines) + "\n]}\n")
    print(len(rows), "values,", sum(len(row["rendered"]) for row in rows), "texts,", path.stat().st_size, "bytes")


main()
