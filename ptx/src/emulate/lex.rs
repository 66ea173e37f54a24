//! PTX text to tokens with source positions. Honors `# line "file"`, so that positions refer to the unexpanded source.
//! Never knows an instruction.

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Token<'a> {
    /// Names, directives, mnemonics and registers: `.reg`, `add.u32`, `%r1`, `LOOP`.
    Word(&'a str),
    Number(u64),
    /// `8.0`: a version. Floats are given by their bits.
    Decimal(&'a str),
    Text,
    Mark(char),
}

/// An index into the files that markers named, and a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceLine {
    pub file: usize,
    pub line: usize,
}

pub struct Lexed<'a> {
    pub tokens: Vec<(Token<'a>, SourceLine)>,
    pub files: Vec<String>,
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%' | '.')
}

/// Decimal and hexadecimal integers, and floats by their bits: `0f3F800000`, `0d3FF0000000000000`.
fn number(text: &str) -> Result<u64, String> {
    let bits = text.strip_prefix("0f").or(text.strip_prefix("0F")).filter(|h| h.len() == 8);
    let bits = bits.or(text.strip_prefix("0d").or(text.strip_prefix("0D")).filter(|h| h.len() == 16));
    let hex = bits.or(text.strip_prefix("0x").or(text.strip_prefix("0X")));
    let value = match hex {
        Some(digits) => u64::from_str_radix(digits.trim_end_matches('U'), 16),
        None => text.trim_end_matches('U').parse(),
    };
    value.map_err(|_| bad(text))
}

pub fn bad(number: &str) -> String {
    format!("bad number '{number}': integers, and floats as 0f and 8 or 0d and 16 hexadecimal digits")
}

/// Errors name their position.
pub fn lex<'a>(file: &str, source: &'a str) -> Result<Lexed<'a>, String> {
    let mut lexed = Lexed { tokens: vec![], files: vec![file.to_string()] };
    let (mut rest, mut place) = (source, SourceLine { file: 0, line: 1 });
    while let Some(c) = rest.chars().next() {
        let at = |files: &[String], what: String| format!("{}:{}: {what}", files[place.file], place.line);
        let (taken, token) = match c {
            '#' => {
                let line = &rest[1..rest.find('\n').unwrap_or(rest.len())];
                place =
                    marker(line, &mut lexed.files).ok_or_else(|| at(&lexed.files, format!("bad marker '#{line}'")))?;
                rest = rest[1 + line.len()..].strip_prefix('\n').unwrap_or("");
                continue;
            }
            _ if c.is_whitespace() => (rest.len() - rest.trim_start().len(), None),
            _ if rest.starts_with("//") => (rest.find('\n').unwrap_or(rest.len()), None),
            _ if rest.starts_with("/*") => match rest.find("*/") {
                Some(end) => (end + 2, None),
                None => return Err(at(&lexed.files, "a /* comment is not closed".into())),
            },
            '"' => match rest[1..].find('"') {
                Some(end) => (end + 2, Some(Token::Text)),
                None => return Err(at(&lexed.files, "a string is not closed".into())),
            },
            _ if c.is_ascii_digit() => {
                let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '.').unwrap_or(rest.len());
                let text = &rest[..end];
                let decimal = text.contains('.').then_some(Token::Decimal(text));
                (
                    end,
                    Some(decimal.map_or_else(|| number(text).map(Token::Number), Ok).map_err(|e| at(&lexed.files, e))?),
                )
            }
            _ if is_word(c) => {
                // `::` joins words: .shared::cta
                let mut end = 0;
                while let Some(&byte) = rest.as_bytes().get(end) {
                    end += match byte {
                        _ if is_word(byte.into()) => 1,
                        b':' if rest[end..].starts_with("::") => 2,
                        _ => break,
                    };
                }
                (end, Some(Token::Word(&rest[..end])))
            }
            _ => (c.len_utf8(), Some(Token::Mark(c))),
        };
        lexed.tokens.extend(token.map(|t| (t, place)));
        place.line += rest[..taken].bytes().filter(|&b| b == b'\n').count();
        rest = &rest[taken..];
    }
    Ok(lexed)
}

/// The position of the line after `# 12 "file"`.
fn marker(text: &str, files: &mut Vec<String>) -> Option<SourceLine> {
    let (line, name) = text.trim().split_once(' ')?;
    let name = name.trim().strip_prefix('"')?.strip_suffix('"')?;
    let file = files.iter().position(|f| f == name).unwrap_or_else(|| {
        files.push(name.to_string());
        files.len() - 1
    });
    Some(SourceLine { file, line: line.parse().ok()? })
}
