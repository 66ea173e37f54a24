//! Resource limits for chat templates: a hostile one ends with an error instead of exhausting memory or running
//! forever. Never changes what a template within the limits renders.
//!
//! Fuel counts instructions, but one instruction can double a text, or read a self-referencing list 2^60 times. So a
//! template is compiled with extra instructions between its own ([`bounded`]): every value is weighed before an
//! instruction reads it deeply, everything an instruction produces is charged, and lazy sequences are computed at once.
//! Filters that multiply their arguments are charged before they run ([`guard`]). In total a render executes at most
//! [`FUEL`] instructions, reads [`READ`] bytes and makes [`MADE`] bytes; no value is deeper than [`DEEP`].
use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Token, Vm, WhitespaceConfig};
use minijinja::machinery::{make_string_output, parse, tokenize};
use minijinja::value::{Object, ObjectRepr, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, filters, tests};
use minijinja_contrib::pycompat::unknown_method_callback;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Instructions per conversation, extra ones included. A template takes about 500 per message.
const FUEL: u64 = 20_000_000;
/// Bytes of text and lists produced per conversation.
const MADE: u64 = 512 << 20;
/// Bytes read per conversation, where a value counts 64 and text its length.
const READ: u64 = 16 << 30;
/// Limits of one value: parts, bytes of text, nesting levels.
const PARTS: u64 = 1_000_000;
const TEXT: u64 = 16 << 20; // a list of its letters takes 24 times the memory
const DEEP: u32 = 64;
/// Bytes of a template, and tokens in one expression: the compiler's recursion is as deep as an expression is long.
const TEMPLATE: usize = 1 << 20;
const WORDS: usize = 2000;

pub(super) const OUT_OF_FUEL: &str = "the template runs more than 20 million instructions for one conversation";

/// Filter names that no template can spell.
const HELD: &str = "=held";
const ALL_HELD: &str = "=all";
const MADE_HERE: &str = "=made";
const SPEND: &str = "=spend";

/// Resources used by a render so far.
#[derive(Debug, Default)]
struct Used {
    made: AtomicU64,
    read: AtomicU64,
}
impl Object for Used {}

pub(super) fn too_much(what: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

/// Charges `bytes` that are about to be produced, or were.
pub(super) fn spend(state: &State, bytes: u64) -> Result<(), Error> {
    let used = state.get_or_set_temp_object("=used", Used::default);
    match used.made.fetch_add(bytes.min(MADE + 1), Relaxed).saturating_add(bytes) <= MADE {
        true => Ok(()),
        false => Err(too_much(format!("the template makes more than {} MiB of text for one conversation", MADE >> 20))),
    }
}

fn read(state: &State, bytes: u64) -> Result<(), Error> {
    let used = state.get_or_set_temp_object("=used", Used::default);
    match used.read.fetch_add(bytes.min(READ + 1), Relaxed).saturating_add(bytes) <= READ {
        true => Ok(()),
        false => Err(too_much(format!("the template reads more than {} GiB for one conversation", READ >> 30))),
    }
}

/// The weight of a value with everything it contains, counting repeated parts every time.
#[derive(Default)]
pub(super) struct Weight {
    pub parts: u64,
    pub text: u64,
    pub depth: u32,
}

impl Weight {
    fn add(&mut self, value: &Value, depth: u32) -> Result<(), Error> {
        self.parts += 1;
        self.depth = self.depth.max(depth);
        self.text += value.as_str().map_or(0, str::len).max(value.as_bytes().map_or(0, <[u8]>::len)) as u64;
        if self.parts > PARTS || self.text > TEXT || depth > DEEP {
            return Err(too_much(format!(
                "the template computes with a value of more than {PARTS} parts, {} MiB of text or {DEEP} levels",
                TEXT >> 20
            )));
        }
        let Some(object) = value.as_object() else { return Ok(()) };
        match object.repr() {
            ObjectRepr::Map => object.try_iter_pairs().into_iter().flatten().try_for_each(|(key, value)| {
                self.add(&key, depth + 1)?;
                self.add(&value, depth + 1)
            }),
            ObjectRepr::Seq | ObjectRepr::Iterable => {
                object.try_iter().into_iter().flatten().try_for_each(|value| self.add(&value, depth + 1))
            }
            _ => Ok(()),
        }
    }
}

/// Charges what it takes to read all of `values`.
pub(super) fn weigh(state: &State, values: &[Value]) -> Result<Weight, Error> {
    let mut weight = Weight::default();
    values.iter().try_for_each(|value| weight.add(value, 0))?;
    read(state, 64 * weight.parts + weight.text)?;
    Ok(weight)
}

/// Charges a value that an instruction produced, and computes it now if it is lazy.
fn made(state: &State, value: Value) -> Result<Value, Error> {
    let value = match value.kind() {
        ValueKind::Iterable => Value::from(value.try_iter()?.take(PARTS as usize + 1).collect::<Vec<_>>()),
        _ => value,
    };
    weigh(state, std::slice::from_ref(&value))?;
    let text = |value: &Value| value.as_str().map_or(0, str::len) as u64;
    let list = value.as_object().filter(|o| matches!(o.repr(), ObjectRepr::Seq | ObjectRepr::Map));
    let parts = list.and_then(|o| o.try_iter()).into_iter().flatten().map(|part| 64 + text(&part));
    spend(state, text(&value) + parts.sum::<u64>())?;
    Ok(value)
}

/// Installs the limits in `env`, for templates from [`compile`].
pub(super) fn install(env: &mut Environment) {
    env.set_fuel(Some(FUEL));
    env.add_filter(HELD, |state: &State, value: Value| weigh(state, std::slice::from_ref(&value)).map(|_| value));
    env.add_filter(ALL_HELD, |state: &State, values: Rest<Value>| weigh(state, &values).map(|_| Value::from(values.0)));
    env.add_filter(MADE_HERE, made);
    env.add_filter(SPEND, |state: &State, bytes: u64| spend(state, bytes).map(|()| Value::from(0)));
    env.remove_global("debug"); // prints every variable
    guard(env, "replace", Value::from_function(filters::replace), |_, args| Ok(replaced(args)));
    guard(env, "join", Value::from_function(filters::join), |_, args| Ok(joined(args)));
    guard(env, "indent", Value::from_function(filters::indent), |_, args| {
        let lines = args.first().and_then(Value::as_str).map_or(0, |text| text.matches('\n').count());
        Ok((lines as u64 + 1).saturating_mul(largest(args)))
    });
    guard(env, "batch", Value::from_function(filters::batch), |_, args| Ok(largest(args).saturating_mul(64)));
    guard(env, "slice", Value::from_function(filters::slice), |_, args| Ok(largest(args).saturating_mul(64)));
    guard(env, "format", Value::from_function(filters::format), formatted);
    guard(env, "pprint", Value::from_function(filters::pprint), |state, args| Ok(weigh(state, args)?.parts * 256));
    let is_in = Value::from_function(tests::is_in);
    env.add_test("in", move |state: &State, args: Rest<Value>| {
        weigh(state, args.get(1..).unwrap_or_default())?; // charged for each item that `select` tries
        is_in.call(state, &args).map(|found| found.is_true())
    });
    env.set_unknown_method_callback(|state, value, method, args| {
        let all: Vec<Value> = std::iter::once(value).chain(args).cloned().collect();
        let text = |value: Option<&Value>| value.and_then(Value::as_str).map_or(0, str::len) as u64;
        match (value.kind(), method) {
            (ValueKind::String, "replace") => spend(state, replaced(&all))?,
            (ValueKind::String, "join") => spend(state, joined(&[args, std::slice::from_ref(value)].concat()))?,
            (ValueKind::String, "format") => spend(state, formatted(state, &all)?)?,
            (ValueKind::String, "strip" | "lstrip" | "rstrip") => {
                read(state, text(Some(value)).saturating_mul(text(args.first())))?;
            }
            (ValueKind::String, "count") if args.first().and_then(Value::as_str) == Some("") => {
                return Err(too_much("count() of an empty string never ends".into()));
            }
            _ => {}
        }
        unknown_method_callback(state, value, method, args)
    });
}

/// Adds a filter that is charged before it runs.
fn guard(
    env: &mut Environment,
    name: &'static str,
    plain: Value,
    cost: impl Fn(&State, &[Value]) -> Result<u64, Error> + Send + Sync + 'static,
) {
    env.add_filter(name, move |state: &State, args: Rest<Value>| {
        spend(state, cost(state, &args)?)?;
        plain.call(state, &args)
    });
}

/// Bytes that replacing (text, from, to) inserts.
fn replaced(args: &[Value]) -> u64 {
    let [text, from, to, ..] = args else { return 0 };
    let found = text.to_string().matches(&from.to_string()).count() as u64;
    found.saturating_mul(to.to_string().len() as u64)
}

/// Bytes of separators between the items of (list, separator).
fn joined(args: &[Value]) -> u64 {
    let [list, separator, ..] = args else { return 0 };
    let items = list.as_str().map(str::len).or(list.len()).unwrap_or_default() as u64;
    items.saturating_mul(separator.to_string().len() as u64)
}

/// The largest integer among the arguments.
fn largest(args: &[Value]) -> u64 {
    let named = args.iter().filter_map(Value::as_object).filter_map(|o| o.try_iter_pairs()).flatten();
    let all = args.iter().cloned().chain(named.map(|(_, value)| value));
    all.filter_map(|value| value.as_usize()).max().unwrap_or(0) as u64
}

/// Bytes a format and its arguments may produce: each field may be as wide as the largest number, and hold all
/// arguments.
fn formatted(state: &State, args: &[Value]) -> Result<u64, Error> {
    let Some(text) = args.first().and_then(Value::as_str) else { return Ok(0) };
    let fields = text.matches(['%', '{']).count() as u64;
    let numbers = text.split(|c: char| !c.is_ascii_digit()).map(|digits| digits.parse().unwrap_or(0));
    let width = numbers.max().unwrap_or(0).max(if text.contains('*') { largest(args) } else { 0 });
    let rest = weigh(state, &args[1..])?;
    let longest = text.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap_or(0);
    let width: u64 = if longest > 18 { u64::MAX } else { width };
    Ok(fields.saturating_mul(width.saturating_add(rest.text + 64 * rest.parts)))
}

/// The instructions of the template `source`. Its text is leaked: a run has one or two templates.
pub(super) fn compile(name: &'static str, source: String) -> Result<Instructions<'static>, Error> {
    if source.len() > TEMPLATE {
        return Err(too_much(format!("it has {} bytes; the limit is {TEMPLATE}", source.len())));
    }
    let source: &'static str = source.leak();
    let spaces = || WhitespaceConfig { trim_blocks: true, lstrip_blocks: true, ..WhitespaceConfig::default() };
    // Up to the first invalid token: the parser reports what is wrong with it.
    words(tokenize(source, false, Default::default(), spaces()).map_while(Result::ok).map(|(token, _)| token))?;
    let tree = parse(source, name, Default::default(), spaces())?;
    let mut code = CodeGenerator::new(name, source);
    code.compile_stmt(&tree);
    let (plain, blocks) = code.finish();
    match blocks.is_empty() {
        true => bounded(&plain, name, source),
        false => Err(too_much("it has blocks, which only make sense in templates that extend others".into())),
    }
}

/// Refuses expressions that the compiler would recurse into too deeply, and products of constants, which it would
/// compute.
fn words<'s>(tokens: impl Iterator<Item = Token<'s>>) -> Result<(), Error> {
    let mut tag: Vec<Token> = Vec::new();
    for token in tokens {
        if !matches!(token, Token::VariableEnd | Token::BlockEnd) {
            tag.push(token);
            if tag.len() > WORDS {
                return Err(too_much(format!("an expression has more than {WORDS} tokens")));
            }
            continue;
        }
        for (at, _) in tag.iter().enumerate().filter(|(_, t)| matches!(t, Token::Mul)) {
            let (left, right) = (&tag[..at], &tag[at + 1..]);
            let argument = matches!(left.last(), Some(Token::ParenOpen | Token::Comma)); // f(*list)
            if !argument && !varies(left.iter().rev(), is_close, is_open) && !varies(right.iter(), is_open, is_close) {
                return Err(too_much("it multiplies constants; write the product instead".into()));
            }
        }
        tag.clear();
    }
    Ok(())
}

fn is_open(token: &Token) -> bool {
    matches!(token, Token::ParenOpen | Token::BracketOpen | Token::BraceOpen)
}
fn is_close(token: &Token) -> bool {
    matches!(token, Token::ParenClose | Token::BracketClose | Token::BraceClose)
}

/// Whether the operand next to an operator contains a variable or is called on one. `words` start at the operator.
fn varies<'t>(
    words: impl Iterator<Item = &'t Token<'t>>,
    into: fn(&Token) -> bool,
    out_of: fn(&Token) -> bool,
) -> bool {
    const NO_VARIABLE: [&str; 15] =
        ["true", "True", "false", "False", "none", "None", "and", "or", "not", "in", "if", "elif", "else", "is", "do"];
    let mut depth = 0;
    for word in words {
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

/// The instructions of `plain`, with the extra ones between them.
fn bounded(
    plain: &Instructions<'static>,
    name: &'static str,
    source: &'static str,
) -> Result<Instructions<'static>, Error> {
    use Instruction as I;
    let all: Vec<&I> = (0..plain.len() as u32).filter_map(|at| plain.get(at)).collect();
    let mut parts = Vec::with_capacity(all.len());
    for &instruction in &all {
        let before = match *instruction {
            I::EmitRaw(text) => {
                Ok(vec![I::LoadConst(Value::from(text.len())), I::ApplyFilter(SPEND, Some(1), !0), I::DiscardTop])
            }
            I::Add | I::Mul | I::Eq | I::Ne | I::Gt | I::Gte | I::Lt | I::Lte => held(2),
            I::StringConcat | I::In | I::CompareAndPreserve(_) => held(2),
            I::PushLoop(_) | I::FastRecurse | I::GetItem => held(1), // for an item: its key
            I::Slice => held(4),
            I::BuildMap(pairs) => held(2 * pairs),
            I::MergeKwargs(n) => held(n),
            I::CallFunction(_, Some(n)) | I::CallMethod(_, Some(n)) | I::CallObject(Some(n)) => held(n.into()),
            I::ApplyFilter(_, Some(n), _) | I::PerformTest(_, Some(n), _) => held(n.into()),
            I::CallFunction(_, None) | I::CallMethod(_, None) | I::CallObject(None) => several(),
            I::ApplyFilter(_, None, _) | I::PerformTest(_, None, _) => several(),
            I::CallBlock(_) | I::LoadBlocks | I::Include(_) | I::ExportLocals => {
                Err(too_much("it refers to blocks or other templates, and there are none".into()))
            }
            _ => Ok(vec![]),
        }?;
        let operator = matches!(instruction, I::Add | I::Mul | I::StringConcat | I::Slice);
        let builder = matches!(instruction, I::BuildList(_) | I::BuildMap(_) | I::EndCapture);
        let call =
            matches!(instruction, I::CallFunction(..) | I::CallMethod(..) | I::CallObject(_) | I::ApplyFilter(..));
        let after = operator || builder || call;
        parts.push((before, after));
    }
    let mut starts = vec![0u32];
    for (before, after) in &parts {
        starts.push(starts[starts.len() - 1] + before.len() as u32 + 1 + u32::from(*after));
    }
    let mut out = Instructions::new(name, source);
    for (at, (before, after)) in parts.into_iter().enumerate() {
        let line = plain.get_line(at as u32).unwrap_or_default() as u16;
        let moved = match all[at].clone() {
            I::Iterate(to) => I::Iterate(starts[to as usize]),
            I::Jump(to) => I::Jump(starts[to as usize]),
            I::JumpIfFalse(to) => I::JumpIfFalse(starts[to as usize]),
            I::JumpIfFalseOrPop(to) => I::JumpIfFalseOrPop(starts[to as usize]),
            I::JumpIfTrueOrPop(to) => I::JumpIfTrueOrPop(starts[to as usize]),
            I::BuildMacro(name, to, flags) => I::BuildMacro(name, starts[to as usize], flags),
            other => other,
        };
        let after = after.then_some(I::ApplyFilter(MADE_HERE, Some(1), !0));
        before.into_iter().chain([moved]).chain(after).for_each(|i| {
            out.add_with_line(i, line);
        });
    }
    Ok(out)
}

/// Weighs the top `n` values of the stack, and leaves them there.
fn held(n: usize) -> Result<Vec<Instruction<'static>>, Error> {
    use Instruction as I;
    let count = u16::try_from(n).map_err(|_| too_much(format!("it lists {n} values in one expression")))?;
    Ok(match count {
        0 => vec![],
        1 => vec![I::ApplyFilter(HELD, Some(1), !0)],
        _ => vec![I::ApplyFilter(ALL_HELD, Some(count), !0), I::UnpackLists(1), I::DiscardTop],
    })
}

/// The same for the number of values that the top of the stack gives.
fn several() -> Result<Vec<Instruction<'static>>, Error> {
    Ok(vec![Instruction::ApplyFilter(ALL_HELD, None, !0), Instruction::UnpackLists(1)])
}

/// Renders `context` with the instructions of [`compile`].
pub(super) fn run(env: &Environment, instructions: &Instructions<'static>, context: Value) -> Result<String, Error> {
    let mut text = String::new();
    let mut out = make_string_output(&mut text);
    Vm::new(env).eval(instructions, context, &BTreeMap::new(), &mut out, AutoEscape::None)?;
    Ok(text)
}
