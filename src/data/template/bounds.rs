//! Resource limits for chat templates: a hostile one ends with an error instead of exhausting memory or running
//! forever. Never changes what a template within the limits renders.
//!
//! Fuel counts instructions, but one instruction can double a text, or read a self-referencing list 2^60 times. So a
//! template is compiled with extra instructions between its own ([`bounded`]): every value is weighed before an
//! instruction reads it deeply, everything an instruction produces is charged, and lazy sequences are computed at once.
//! Where Python makes a text of a value, or refuses to, the extra instructions do it instead of Rust. Filters that
//! multiply their arguments are charged before they run ([`guard`], [`super::filters`]). In total a render executes at
//! most [`FUEL`] instructions, and reads and makes what [`super::budget`] allows.
use super::budget::{PARTS, spend, too_much, weigh};
use super::operators::{self, Operator};
use super::python;
use super::source::{ONE, rewritten, spaces};
use minijinja::machinery::{CodeGenerator, Instruction, Instructions, Vm, make_string_output, parse};
use minijinja::value::{ObjectRepr, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, State, filters, tests};
use std::collections::BTreeMap;

/// Instructions per conversation, extra ones included. A template takes about 500 per message.
const FUEL: u64 = 20_000_000;
/// Bytes of a template.
const TEMPLATE: usize = 1 << 20;

pub(super) const OUT_OF_FUEL: &str = "the template runs more than 20 million instructions for one conversation";

/// Filter names that no template can spell.
const HELD: &str = "=held";
const ALL_HELD: &str = "=all";
const MADE_HERE: &str = "=made";
const SPEND: &str = "=spend";
const TEXTS: &str = "=texts";
const KEYS: &str = "=keys";
const CONTAINS: &str = "=contains";
const ORDERED: &str = "=ordered";
const LOOP: &str = "=loop";
const MODULO_BY_ITEMS: &str = "=tuple";
const SLICE: &str = "=slice";

/// What computes as Python does, by name.
const OPERATORS: [(&str, Operator); 8] = [
    ("=+", operators::add),
    ("=-", operators::subtract),
    ("=*", operators::multiply),
    ("=/", operators::divide),
    ("=//", operators::divide_down),
    ("=%", operators::modulo),
    ("=**", operators::power),
    (MODULO_BY_ITEMS, operators::modulo_by_items),
];

/// The name of what computes instead of an instruction, whose right operand `before` makes.
fn operator(instruction: &Instruction, before: Option<&&Instruction>) -> Option<&'static str> {
    Some(match instruction {
        Instruction::Add => "=+",
        Instruction::Sub => "=-",
        Instruction::Mul => "=*",
        Instruction::Div => "=/",
        Instruction::IntDiv => "=//",
        // A text is formatted by a list that is spelled out, as by a tuple, or by one value.
        Instruction::Rem if before.is_some_and(|before| is_list(before)) => MODULO_BY_ITEMS,
        Instruction::Rem => "=%",
        Instruction::Pow => "=**",
        _ => return None,
    })
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
    env.add_filter(TEXTS, |state: &State, values: Rest<Value>| {
        weigh(state, &values)?;
        values.iter().map(|value| python::text_value(state, value)).collect::<Result<Vec<_>, _>>().map(Value::from)
    });
    env.add_filter(KEYS, |state: &State, values: Rest<Value>| {
        weigh(state, &values)?;
        values.iter().step_by(2).try_for_each(python::hashable).map(|()| Value::from(values.0))
    });
    env.add_filter(CONTAINS, |state: &State, values: Rest<Value>| {
        weigh(state, &values)?;
        python::containable(&values[0], &values[1]).map(|()| Value::from(values.0))
    });
    env.add_filter(ORDERED, |state: &State, values: Rest<Value>| {
        weigh(state, &values)?;
        operators::ordered(&values[0], &values[1])
    });
    for (name, operator) in OPERATORS {
        env.add_filter(name, move |state: &State, a: Value, b: Value| operator(state, &a, &b));
    }
    env.add_global(ONE, 1);
    env.add_filter(LOOP, |state: &State, value: Value| {
        weigh(state, std::slice::from_ref(&value))?;
        python::iterable(&value)?;
        // The engine does not count the characters of a text, on which `loop.last` and `loop.length` depend.
        let characters = value.as_str().map(|text| text.chars().map(Value::from).collect());
        characters.map_or(Ok(value), |list| made(state, list))
    });
    env.add_filter(SLICE, slice);
    env.remove_global("debug"); // prints every variable
    guard(env, "batch", Value::from_function(filters::batch), |args| largest(args).saturating_mul(64));
    guard(env, "slice", Value::from_function(filters::slice), |args| largest(args).saturating_mul(64));
    let is_in = Value::from_function(tests::is_in);
    env.add_test("in", move |state: &State, args: Rest<Value>| {
        weigh(state, args.get(1..).unwrap_or_default())?; // charged for each item that `select` tries
        if let [value, container] = &args[..] {
            python::containable(value, container)?;
        }
        is_in.call(state, &args).map(|found| found.is_true())
    });
}

/// `value[start:stop:step]` of a text or a list, as in Python.
fn slice(value: Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    let refused = || python::type_error(format!("'{}' object is not subscriptable", python::type_name(&value)));
    let items = match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.collect::<Vec<Value>>(),
        ValueKind::String => Vec::new(),
        _ => return Err(refused()),
    };
    let text = value.as_str();
    let len = text.map_or(items.len(), |text| text.chars().count()) as i128;
    let given = |value: &Value| if value.is_none() { Ok(None) } else { python::whole(value).map(Some) };
    let step = given(&step)?.unwrap_or(1);
    if step == 0 {
        return Err(python::type_error("slice step cannot be zero".into()));
    }
    // The places that a slice may begin and end at: from the first item on, or from the last one back.
    let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let place = |value: Option<i128>, otherwise: i128| {
        let from_start = |at: i128| if at < 0 { at.saturating_add(len) } else { at };
        value.map_or(otherwise, |at| from_start(at).clamp(lowest, highest))
    };
    let (first, last) = if step > 0 { (lowest, highest) } else { (highest, lowest) };
    let (first, last) = (place(given(&start)?, first), place(given(&stop)?, last));
    let stride = usize::try_from(step.unsigned_abs()).unwrap_or(usize::MAX);
    let span = if step > 0 { last - first } else { first - last }.max(0) as usize;
    let taken = span.div_ceil(stride);
    let skipped = if step > 0 { first } else { len - 1 - first } as usize;
    Ok(match (text, step > 0) {
        (Some(text), true) => text.chars().skip(skipped).step_by(stride).take(taken).collect::<String>().into(),
        (Some(text), false) => text.chars().rev().skip(skipped).step_by(stride).take(taken).collect::<String>().into(),
        (None, true) => items.into_iter().skip(skipped).step_by(stride).take(taken).collect(),
        (None, false) => items.into_iter().rev().skip(skipped).step_by(stride).take(taken).collect(),
    })
}

/// Adds a filter that is charged before it runs.
fn guard(
    env: &mut Environment,
    name: &'static str,
    plain: Value,
    cost: impl Fn(&[Value]) -> u64 + Send + Sync + 'static,
) {
    env.add_filter(name, move |state: &State, args: Rest<Value>| {
        spend(state, cost(&args))?;
        plain.call(state, &args)
    });
}

/// The largest integer among the arguments.
fn largest(args: &[Value]) -> u64 {
    let named = args.iter().filter_map(Value::as_object).filter_map(|o| o.try_iter_pairs()).flatten();
    let all = args.iter().cloned().chain(named.map(|(_, value)| value));
    all.filter_map(|value| value.as_usize()).max().unwrap_or(0) as u64
}

/// The instructions of the template `source`. Its text is leaked: a run has one or two templates.
pub(super) fn compile(name: &'static str, source: String) -> Result<Instructions<'static>, Error> {
    if source.len() > TEMPLATE {
        return Err(too_much(format!("it has {} bytes; the limit is {TEMPLATE}", source.len())));
    }
    let source: &'static str = rewritten(&source)?.leak();
    let tree = parse(source, name, Default::default(), spaces())?;
    let mut code = CodeGenerator::new(name, source);
    code.compile_stmt(&tree);
    let (plain, blocks) = code.finish();
    match blocks.is_empty() {
        true => bounded(&plain, name, source),
        false => Err(too_much("it has blocks, which only make sense in templates that extend others".into())),
    }
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
            I::Gt | I::Gte | I::Lt | I::Lte => every(ORDERED, 2),
            I::Add | I::Mul | I::Rem | I::Eq | I::Ne => held(2),
            I::StringConcat => every(TEXTS, 2),
            I::In => every(CONTAINS, 2),
            I::CompareAndPreserve(_) => held(2),
            I::PushLoop(_) | I::FastRecurse => Ok(vec![I::ApplyFilter(LOOP, Some(1), !0)]),
            I::GetItem => held(1), // the key
            I::Slice => held(4),
            I::BuildMap(pairs) => every(KEYS, 2 * pairs),
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
        let operator = matches!(instruction, I::Add | I::Mul | I::Rem | I::StringConcat | I::Slice);
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
        let before_it = at.checked_sub(1).and_then(|before| all.get(before));
        let moved = match all[at].clone() {
            I::Slice => I::ApplyFilter(SLICE, Some(4), !0),
            I::Iterate(to) => I::Iterate(starts[to as usize]),
            I::Jump(to) => I::Jump(starts[to as usize]),
            I::JumpIfFalse(to) => I::JumpIfFalse(starts[to as usize]),
            I::JumpIfFalseOrPop(to) => I::JumpIfFalseOrPop(starts[to as usize]),
            I::JumpIfTrueOrPop(to) => I::JumpIfTrueOrPop(starts[to as usize]),
            I::BuildMacro(name, to, flags) => I::BuildMacro(name, starts[to as usize], flags),
            other => operator(&other, before_it).map_or(other, |name| I::ApplyFilter(name, Some(2), !0)),
        };
        let after = after.then_some(I::ApplyFilter(MADE_HERE, Some(1), !0));
        before.into_iter().chain([moved]).chain(after).for_each(|i| {
            out.add_with_line(i, line);
        });
    }
    Ok(out)
}

/// Whether an instruction makes the list of a template's text.
fn is_list(instruction: &Instruction) -> bool {
    match instruction {
        Instruction::BuildList(_) => true,
        Instruction::LoadConst(value) => value.kind() == ValueKind::Seq,
        _ => false,
    }
}

/// Weighs the top `n` values of the stack, and leaves them there.
fn held(n: usize) -> Result<Vec<Instruction<'static>>, Error> {
    match n {
        1 => Ok(vec![Instruction::ApplyFilter(HELD, Some(1), !0)]),
        n => every(ALL_HELD, n),
    }
}

/// Replaces the top `n` values of the stack by those of the list that `filter` makes of them.
fn every(filter: &'static str, n: usize) -> Result<Vec<Instruction<'static>>, Error> {
    use Instruction as I;
    let count = u16::try_from(n).map_err(|_| too_much(format!("it lists {n} values in one expression")))?;
    Ok(match count {
        0 => vec![],
        _ => vec![I::ApplyFilter(filter, Some(count), !0), I::UnpackLists(1), I::DiscardTop],
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
