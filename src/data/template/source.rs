//! What is changed in a template's text before it is compiled, where minijinja computes otherwise than Python:
//! products, quotients and conjunctions of constants are left to the run. A default of a macro that names an earlier
//! argument is set in the macro. Never changes the number of a line.
use super::budget::too_much;
use minijinja::Error;
use minijinja::machinery::{Span, Token, WhitespaceConfig, tokenize};

/// Tokens in one expression: the compiler's recursion is as deep as an expression is long.
const WORDS: usize = 2000;
/// A variable that is 1, which the compiler does not know: `'-' * 20` would be computed without limits, and
/// `true and none` as a boolean.
pub(super) const ONE: &str = "one__";
/// A variable that is undefined.
const ABSENT: &str = "absent__";

type Word<'s> = (Token<'s>, Span);

/// The whitespace settings of transformers.
pub(super) fn spaces() -> WhitespaceConfig {
    WhitespaceConfig { trim_blocks: true, lstrip_blocks: true, ..WhitespaceConfig::default() }
}

/// The text to compile. Refuses expressions that the compiler would recurse into too deeply.
pub(super) fn rewritten(source: &str) -> Result<String, Error> {
    let (mut tag, mut changes): (Vec<Word>, Vec<(u32, u32, String)>) = (Vec::new(), Vec::new());
    // Up to the first invalid token: the parser reports what is wrong with it.
    for (token, span) in tokenize(source, false, Default::default(), spaces()).map_while(Result::ok) {
        if !matches!(token, Token::VariableEnd | Token::BlockEnd) {
            tag.push((token, span));
            if tag.len() > WORDS {
                return Err(too_much(format!("an expression has more than {WORDS} tokens")));
            }
            continue;
        }
        let constant = |at: usize| {
            let (left, right) = (&tag[..at], &tag[at + 1..]);
            !varies(left.iter().rev(), is_close, is_open) && !varies(right.iter(), is_open, is_close)
        };
        for (at, (token, span)) in tag.iter().enumerate() {
            let argument = matches!(tag[..at].last(), Some((Token::ParenOpen | Token::Comma, _))); // f(*list)
            let (place, text) = match token {
                Token::Mul if !argument => (span.end_offset, format!(" {ONE} *")),
                Token::Ident("and") => (span.end_offset, format!(" {ONE} and")),
                Token::Div | Token::FloorDiv | Token::Mod => (span.start_offset, format!("* {ONE} ")),
                _ => continue,
            };
            if constant(at) {
                changes.push((place, place, text));
            }
        }
        if matches!(tag[..], [(Token::BlockStart, _), (Token::Ident("macro"), _), ..]) {
            changes.extend(defaults(source, &tag, span));
        }
        tag.clear();
    }
    changes.sort();
    let (mut out, mut done) = (String::with_capacity(source.len()), 0);
    for (from, to, text) in changes {
        out += source.get(done..from as usize).unwrap_or_default();
        out += &text;
        done = to as usize;
    }
    Ok(out + source.get(done..).unwrap_or_default())
}

/// The changes to a macro's tag, which ends at `end`, whose defaults name earlier arguments.
fn defaults(source: &str, tag: &[Word], end: Span) -> Vec<(u32, u32, String)> {
    let (mut changes, mut depth, mut known) = (Vec::new(), 0, Vec::new());
    let text = |from: u32, to: u32| source.get(from as usize..to as usize).unwrap_or_default();
    let closing = text(tag.last().map_or(end.start_offset, |(_, last)| last.end_offset), end.end_offset).trim();
    for (at, (token, _)) in tag.iter().enumerate() {
        depth += i32::from(is_open(token)) - i32::from(is_close(token));
        let (Token::Ident(name), 1, true) = (token, depth, is_argument(tag, at)) else { continue };
        let rest = &tag[at + 1..];
        if let Some((Token::Assign, _)) = rest.first() {
            let mut inner = 0;
            let length = rest[1..].iter().take_while(|(token, _)| {
                let ends = inner == 0 && matches!(token, Token::Comma | Token::ParenClose);
                inner += i32::from(is_open(token)) - i32::from(is_close(token));
                !ends
            });
            let default = &rest[1..1 + length.count()];
            let names = |(token, _): &Word| matches!(token, Token::Ident(name) if known.contains(name));
            if let (true, [(_, first), ..], [.., (_, last)]) = (default.iter().any(names), default, default) {
                let value = text(first.start_offset, last.end_offset);
                let set = format!("{{% set {name} = ({value}) if {name} is undefined else {name} {closing}");
                changes.push((first.start_offset, last.end_offset, ABSENT.into()));
                changes.push((end.end_offset, end.end_offset, set));
            }
        }
        known.push(*name);
    }
    changes
}

fn is_argument(tag: &[Word], at: usize) -> bool {
    at > 0 && matches!(tag[at - 1].0, Token::ParenOpen | Token::Comma)
}

fn is_open(token: &Token) -> bool {
    matches!(token, Token::ParenOpen | Token::BracketOpen | Token::BraceOpen)
}
fn is_close(token: &Token) -> bool {
    matches!(token, Token::ParenClose | Token::BracketClose | Token::BraceClose)
}

/// Whether the operand next to an operator contains a variable or is called on one. `words` start at the operator.
fn varies<'t>(words: impl Iterator<Item = &'t Word<'t>>, into: fn(&Token) -> bool, out_of: fn(&Token) -> bool) -> bool {
    const NO_VARIABLE: [&str; 15] =
        ["true", "True", "false", "False", "none", "None", "and", "or", "not", "in", "if", "elif", "else", "is", "do"];
    let mut depth = 0;
    for (word, _) in words {
        match word {
            Token::Ident(name) if !NO_VARIABLE.contains(name) => return true,
            word if into(word) => depth += 1,
            word if out_of(word) && depth > 0 => depth -= 1,
            Token::Minus => {}
            _ if depth > 0 => {}
            _ => return false,
        }
    }
    false
}
