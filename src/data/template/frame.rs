//! What a chat template puts around an answer. Never sees a conversation of the data.
use minijinja::Value;

/// What a template puts around an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnFrame {
    /// What `add_generation_prompt` adds, such as `<|im_start|>assistant\n<think>\n`.
    pub prompt: String,
    /// Its part that comes before every answer, such as `<|im_start|>assistant\n`.
    pub header: String,
    /// What ends an answer, such as `<|im_end|>\n`; empty if that is only where another message begins.
    pub end: String,
    /// What begins the messages of others, such as `<|im_start|>user\n`.
    pub others: Vec<String>,
    /// The start of an answer follows every conversation, whether it is asked for or not.
    pub always: bool,
}

/// Texts that no template treats in a particular way.
const ASKED: [&str; 2] = ["question-7c1e", "question-92bd"];
const SAID: [&str; 2] = ["answer-41fa", "answer-d60c"];

impl TurnFrame {
    /// From a conversation of two questions and answers, the later of which may be rendered differently.
    /// `render` is the template's: messages, and whether the start of an answer follows.
    pub fn of(render: impl Fn(&[Value], bool) -> Option<String>) -> Option<TurnFrame> {
        let user = |text: &str| message("user", text);
        let turns = [user(ASKED[0]), message("assistant", SAID[0]), user(ASKED[1]), message("assistant", SAID[1])];
        let all = render(&turns, false)?;
        let (first, rest) = all.split_once(ASKED[0])?;
        let (before, rest) = rest.split_once(SAID[0])?;
        let (between, rest) = rest.split_once(ASKED[1])?;
        let (_, after) = rest.split_once(SAID[1])?;
        let end = common(between, after);
        let ended = |prompt: bool| {
            let text = render(&turns[..1], prompt)?;
            text.split_once(ASKED[0]).map(|(_, ended)| ended.to_string())
        };
        let (asked, ended) = (ended(true)?, ended(false)?);
        // What precedes the first question, and the end of an answer before the second one, are both its header.
        let shared = common_end(first, between);
        // "<|begin|>" and "<|eot|>" end alike, too: a header begins with a mark.
        let next = between.len() - shared.len() + shared.find(['<', '[']).unwrap_or(0);
        let (done, added) = (&between[..next], after.strip_prefix(&between[..next]).unwrap_or_default());
        if asked == ended && !blank(done) && !blank(added) && before.ends_with(added) && asked.ends_with(added) {
            let [end, others] = [done, &between[next..]].map(|text| text.to_string());
            let header = added.to_string();
            return Some(TurnFrame { prompt: header.clone(), header, end, others: vec![others], always: true });
        }
        let prompt = asked.strip_prefix(&ended).unwrap_or_default();
        let header = common(before.strip_prefix(&ended).unwrap_or_default(), prompt);
        // A template without a header answers right after the end of the question: "[/INST]".
        let ended = common(before, &asked);
        let (prompt, header) = if blank(header) { (ended, ended) } else { (prompt, header) };
        // The beginning of a next message is no end: "<|end|>\n<|" before "<|user|>" and "<|endoftext|>".
        let is_header = |at: &usize| end.is_char_boundary(*at) && header.starts_with(&end[*at..]);
        let cut = (0..end.len()).filter(is_header).find(|at| !blank(&end[..*at]));
        let end = if blank(end) { "" } else { &end[..cut.unwrap_or(end.len())] };
        let tool = [user(ASKED[0]), message("assistant", SAID[0]), message("tool", ASKED[1])];
        let tool = render(&tool, false);
        let tool = tool.as_deref().and_then(|text| text.split_once(SAID[0])?.1.split_once(ASKED[1]));
        let others = [Some(between), tool.map(|(between, _)| between)].into_iter().flatten();
        let others = others.filter_map(|text| text.strip_prefix(end)).map(str::trim).filter(|text| !text.is_empty());
        let others: Vec<String> = others.map(str::to_string).collect();
        if blank(header) || end.is_empty() && others.is_empty() {
            return None;
        }
        Some(TurnFrame { prompt: prompt.into(), header: header.into(), end: end.into(), others, always: false })
    }
}

fn message(role: &str, content: &str) -> Value {
    Value::from_iter([("role", Value::from(role)), ("content", Value::from(content))])
}

fn blank(text: &str) -> bool {
    text.trim().is_empty()
}

/// The longest common ending, as the end of `b`.
fn common_end<'a>(a: &str, b: &'a str) -> &'a str {
    let same = a.chars().rev().zip(b.char_indices().rev()).take_while(|(a, (_, b))| a == b);
    same.last().map_or("", |(_, (at, _))| &b[at..])
}

/// The longest common beginning.
fn common<'a>(a: &'a str, b: &str) -> &'a str {
    let same = a.char_indices().zip(b.chars()).find(|((_, a), b)| a != b);
    let end = same.map_or(a.len().min(b.len()), |((at, _), _)| at);
    &a[..end]
}
