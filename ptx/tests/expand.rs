//! The expander from outside: the output of each directive and, for every error, the file and line, including the
//! call's.
use flatshard_ptx::expand::{ExpandError, expand};

fn nothing(_: &str) -> Option<String> {
    None
}
fn ok(source: &str) -> String {
    expand("k.ptx", source, &[], &nothing).unwrap()
}
/// The expansion without markers and with whitespace collapsed, for tests of words only.
fn words(source: &str) -> String {
    let text = ok(source);
    let lines = text.lines().filter(|l| !l.starts_with("# "));
    lines.flat_map(str::split_whitespace).collect::<Vec<_>>().join(" ")
}
fn error(source: &str) -> String {
    expand("k.ptx", source, &[], &nothing).unwrap_err().to_string()
}

#[test]
fn plain_ptx_passes_through() {
    let plain = "\
.version 8.0
.target sm_80
.address_size 64
.const .f32 table[4];
// a comment with $NAME, LOAD!(x) and .for i in 0 .. 2 {
/* a block comment: ${nothing} }
   over two lines */
.visible .entry k(.param .u64 p)
{
    .pragma \"nounroll $X {\";
    @%p bra L_1;   setp.ne.b32 %p, %r1, 0;
    st.global.v2.f32 [%rd1+8], {%f0, %f1};
L_1: ret;
}
";
    assert_eq!(ok(plain), plain);
}

#[test]
fn constants_and_expressions() {
    assert_eq!(words(".const N = 4\n.const M = N * (2 + 1) % 7\nmov $N, ${M << 3};"), "mov 4, 40;");
    for (text, value) in [
        ("1 + 2 * 3", 7),
        ("(1 + 2) * 3", 9),
        ("10 - 4 - 3", 3),
        ("7 / 2 % 2", 1),
        ("-3 + 0x10", 13),
        ("1 << 4 >> 2", 4),
        ("1 | 6 & 3 ^ 1", 3),
        ("2 < 3 && !(2 >= 3) || 0", 1),
        ("1 == 1 != 0", 1),
        ("0 ? 5 : 1 ? 6 : 7", 6),
    ] {
        assert_eq!(words(&format!("${{{text}}}")), value.to_string(), "{text}");
    }
}

#[test]
fn a_given_value_wins_over_a_default() {
    let source = ".const DIM = 64\nmov %a, $DIM;\n";
    let text = expand("k.ptx", source, &[("DIM", 128)], &nothing).unwrap();
    assert!(text.contains("mov %a, 128;"), "{text}");
    let e = expand("k.ptx", source, &[("DIMM", 128)], &nothing).unwrap_err();
    assert_eq!(e.to_string(), "k.ptx:1: 'DIMM' is given, but no .const has that name");
}

#[test]
fn loops_unroll_ranges_and_lists() {
    assert_eq!(words(".for i in 0 .. 3 { a${2 * i} }"), "a0 a2 a4");
    assert_eq!(words(".for i in 16, 8, 1 + 3 { a$i }"), "a16 a8 a4");
    assert_eq!(words(".for i in 0 .. 2 { .for j in i .. 2 { a${i}_$j } }"), "a0_0 a0_1 a1_1");
    assert_eq!(words(".for i in 2 .. 2 { a$i }"), "");
    assert_eq!(words(".for i in 0 .. 2 { .const twice = 2 * i\n b$twice }"), "b0 b2");
}

#[test]
fn conditions_choose_and_leave_the_rest_unread() {
    assert_eq!(words(".if 1 < 2 { a } .else { $UNKNOWN }"), "a");
    assert_eq!(words(".if 0 { $UNKNOWN } .else { b }"), "b");
    let chain = |n: i64| words(&format!(".const N = {n}\n.if N == 1 {{ a }} .else .if N == 2 {{ b }} .else {{ c }} d"));
    assert_eq!([chain(1), chain(2), chain(3)], ["a d", "b d", "c d"]);
    assert_eq!(words(".if 1 { a } // why\n/* and */ .else { b } c"), "a c");
}

#[test]
fn register_lists() {
    assert_eq!(words("{%acc[0 .. 3], %acc[2 + 3]}"), "{%acc0, %acc1, %acc2, %acc5}");
    assert_eq!(words(".for j in 1 .. 2 { x %s[4*j .. 4*j+2], [%addr + 4]; }"), "x %s4, %s5, [%addr + 4];");
}

#[test]
fn macros_take_registers_lists_and_numbers() {
    let mma = ".macro MMA(c, a) { mma {$c}, {$a}, {$c}; }\n.for j in 0 .. 2 { MMA!(%s[2*j .. 2*j+2], %q[j]); }";
    assert_eq!(words(mma), "{ mma {%s0, %s1}, {%q0}, {%s0, %s1}; } { mma {%s2, %s3}, {%q1}, {%s2, %s3}; }");
    assert_eq!(words(".macro V(x, n) { {$x[0 .. n]}, $x[n - 1]; }\nV!(%f, 2);"), "{ {%f0, %f1}, %f1; }");
    assert_eq!(words(".macro N(v) { .for i in 0 .. v { a$i } }\nN!(1 + 1)"), "{ a0 a1 }");
    assert_eq!(words(".macro A(x) { $x }\n.macro B(x) { A!($x) }\nB!([%a + 4])"), "{ { [%a + 4] } }");
    assert_eq!(words(".macro E() { ret; }\nE!();"), "{ ret; }");
    // Arguments belong to the caller: a caller's name that equals the parameter's means the caller's.
    assert_eq!(words(".macro P(i) { p$i }\n.for i in 7 .. 8 { P!(i) P!(${i + 1}) }"), "{ p7 } { p8 }");
}

#[test]
fn a_macro_does_not_see_its_callers_names() {
    let e = error(".macro A() {\n  $i\n}\n.for i in 0 .. 1 {\n  A!();\n}\n");
    assert_eq!(e, "k.ptx:2: unknown name '$i'\n  A! called at k.ptx:5");
}

#[test]
fn braces_in_comments_and_strings_do_not_count() {
    assert_eq!(words(".if 1 { a /* } */ b \"}\" // }\n c }"), "a /* } */ b \"}\" // } c");
    assert_eq!(words(".macro M(x) { $x }\nM!(\"a, b)\")"), "{ \"a, b)\" }");
}

#[test]
fn markers_keep_lines_and_name_the_call() {
    let source = ".macro M(x) {\n    first $x;\n    second;\n}\n\nbefore;\nM!(%a);\nafter;\n";
    let text = ok(source);
    // Walk the output as ptxas does.
    let (mut file, mut line, mut seen) = ("k.ptx".to_string(), 1, vec![]);
    for row in text.lines() {
        if let Some(marker) = row.strip_prefix("# ") {
            let (number, name) = marker.split_once(' ').unwrap();
            (line, file) = (number.parse().unwrap(), name.trim_matches('"').to_string());
            continue;
        }
        if let Some(word) = ["first", "second", "before", "after"].iter().find(|w| row.contains(*w)) {
            seen.push((*word, format!("{file}:{line}")));
        }
        line += 1;
    }
    let inside = "k.ptx in M! called at line 7";
    let want = [("before", "k.ptx:6"), ("first", &format!("{inside}:2")), ("second", &format!("{inside}:3"))];
    assert_eq!(seen[..3], want.map(|(w, at)| (w, at.to_string())));
    assert_eq!(seen[3], ("after", "k.ptx:8".to_string()));
}

#[test]
fn includes_bring_macros_and_name_their_own_lines() {
    let shared = |name: &str| match name {
        "m.ptx" => Some(".const W = 2\n.macro TWICE(x) {\n  $x $x $W\n}\n".to_string()),
        "bad.ptx" => Some("ok;\n$NO\n".to_string()),
        "self.ptx" => Some(".include \"self.ptx\"\n".to_string()),
        _ => None,
    };
    let text = expand("k.ptx", ".include \"m.ptx\"\nTWICE!(a)\n", &[("W", 3)], &shared).unwrap();
    assert!(text.contains("a a 3"), "{text}");
    let e = expand("k.ptx", "\n.include \"bad.ptx\"\n", &[], &shared).unwrap_err();
    assert_eq!(e.to_string(), "bad.ptx:2: unknown name '$NO'\n  included at k.ptx:2");
    let e = expand("k.ptx", "\n.include \"none.ptx\"\n", &[], &shared).unwrap_err();
    assert_eq!(e.to_string(), "k.ptx:2: cannot find 'none.ptx' to include");
    let e = expand("k.ptx", ".include \"self.ptx\"\n", &[], &shared).unwrap_err();
    assert_eq!(e.what, "calls are nested deeper than 64");
}

#[test]
fn every_error_names_its_line() {
    for (source, want) in [
        ("\n$NAME\n", "k.ptx:2: unknown name '$NAME'"),
        ("\n$ x\n", "k.ptx:2: unknown name '$x'"),
        ("\n${1 + N}\n", "k.ptx:2: unknown name 'N'"),
        ("\n${1 + }\n", "k.ptx:2: unexpected end of an expression"),
        ("\n${1 + )}\n", "k.ptx:2: unexpected ')' in an expression"),
        ("\n${(1 + 2}\n", "k.ptx:2: missing ')'"),
        ("\n${1 ? 2}\n", "k.ptx:2: missing ':'"),
        ("\n${1 2}\n", "k.ptx:2: '1 2': unexpected '2'"),
        ("\n${12ab}\n", "k.ptx:2: bad number '12ab'"),
        ("\n${1 / 0}\n", "k.ptx:2: 1 / 0 has no value"),
        ("\n${1 % 0}\n", "k.ptx:2: 1 % 0 has no value"),
        ("\n${1 << 64}\n", "k.ptx:2: 1 << 64 has no value"),
        ("\n${0x7fffffffffffffff + 1}\n", "k.ptx:2: 9223372036854775807 + 1 has no value"),
        ("\n${1\n", "k.ptx:2: no '}' closes this '{'"),
        ("\n%a[1\n", "k.ptx:2: no ']' closes this '['"),
        ("\n.const = 3\n", "k.ptx:2: a name after .const expected"),
        ("\n.const N 3\n", "k.ptx:2: expected '=' after .const N"),
        ("\n.const N = 3 +\n", "k.ptx:2: unexpected end of an expression"),
        (".const N = 3\n\n.const N = 4\n", "k.ptx:3: 'N' is defined twice"),
        ("\n.for 3 in 0 .. 2 { }\n", "k.ptx:2: a name after .for expected"),
        ("\n.for { }\n", "k.ptx:2: a name after .for expected"),
        ("\n.for i of 0 .. 2 { }\n", "k.ptx:2: expected 'in' after .for i"),
        ("\n.for i in 0 .. 2\n", "k.ptx:2: '{' expected"),
        ("\n.for i in 0 .. 2 {\n", "k.ptx:2: no '}' closes this '{'"),
        ("\n.if 1\n", "k.ptx:2: '{' expected"),
        ("\n.if N { }\n", "k.ptx:2: unknown name 'N'"),
        ("\n.if 1 { } .else x\n", "k.ptx:2: '{' expected"),
        ("\n.else { }\n", "k.ptx:2: .else without .if"),
        ("\n.macro (a) { }\n", "k.ptx:2: a name after .macro expected"),
        ("\n.macro M { }\n", "k.ptx:2: '(' expected"),
        ("\n.macro M(a\n", "k.ptx:2: no ')' closes this '('"),
        ("\n.macro M(a b) { }\n", "k.ptx:2: 'a b' is not a valid parameter name of M!"),
        ("\n.macro M(a,) { }\n", "k.ptx:2: '' is not a valid parameter name of M!"),
        ("\n.macro M(a)\n", "k.ptx:2: '{' expected"),
        (".macro M() { }\n.macro M() { }\n", "k.ptx:2: M! is defined twice, first at k.ptx:1"),
        ("\nM!(1)\n", "k.ptx:2: unknown macro 'M!'"),
        (".macro M(a) { }\n\nM!(1, 2)\n", "k.ptx:3: M! takes 1 argument, got 2"),
        (".macro M(a, b) { }\n\nM!()\n", "k.ptx:3: M! takes 2 arguments, got 0"),
        (".macro M(a) { }\n\nM!(1\n", "k.ptx:3: no ')' closes this '('"),
        (".macro M(a) { }\n\nM!($x)\n", "k.ptx:3: unknown name '$x'"),
        ("\n/* never\n", "k.ptx:2: a /* comment is not closed"),
        ("\n.pragma \"never\n", "k.ptx:2: a string is not closed on its line"),
        ("\n.include name\n", "k.ptx:2: expected a quoted name after .include"),
    ] {
        assert_eq!(error(source), want, "{source:?}");
    }
}

#[test]
fn errors_inside_macros_name_every_call() {
    let source = ".macro IN(n) {\n  ${n / 0}\n}\n.macro OUT(n) {\n\n  IN!($n);\n}\n.for i in 5 .. 6 {\n  OUT!(i);\n}\n";
    assert_eq!(error(source), "k.ptx:2: 5 / 0 has no value\n  IN! called at k.ptx:6\n  OUT! called at k.ptx:9");
    let e: ExpandError = expand("k.ptx", ".macro M() {\n M!()\n}\nM!()\n", &[], &nothing).unwrap_err();
    assert_eq!((e.what.as_str(), e.through.len()), ("calls are nested deeper than 64", 64));
    assert_eq!(e.through.last().unwrap().2, 4, "the outermost call comes last");
}
