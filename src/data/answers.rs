//! Finds what each answer of a conversation became in its rendered text. Never renders more than the text needs, and
//! never tokenizes.
//!
//! [Note: answers in a rendering] An answer begins after what `add_generation_prompt` adds and ends with the
//! end-of-turn text that follows it. Both come from a conversation of our own ([`TurnFrame`]), rendered once for a
//! template. [`find`] walks through the rendered conversation with them: the text of each message is skipped, so that
//! a message that spells such markup is not taken for it, and as many answers must be found as there are assistant
//! messages. It takes one rendering, and works for templates that change earlier answers (thoughts are removed from
//! them, tools rendered elsewhere). Where a template has no such frame, [`by_prefixes`] renders the conversation up to
//! each answer. What `add_generation_prompt` adds may then have more than the answer has, such as the start of a
//! thought before a call of a tool: [`begins`] leaves that out.
//!
//! [`TurnFrame`]: super::template::TurnFrame
use super::template::{ChatTemplate, Conversation, THOUGHTS, TurnFrame};
use minijinja::Value as Message;
use minijinja::value::ValueKind;
use serde_json::Value;
use std::ops::Range;

/// The bytes of `text`, the rendered `messages`, that each assistant message became, its end of turn included; None if
/// they cannot be told. See [Note: answers in a rendering].
pub(super) fn find(chat: &ChatTemplate, messages: &[Value], text: &str) -> Option<Vec<Range<usize>>> {
    found(chat.frame().filter(|frame| !frame.end.is_empty())?, messages, text)
}

/// The same for a template without an end of turn: an answer ends where another message begins.
pub(super) fn find_endless(chat: &ChatTemplate, messages: &[Value], text: &str) -> Option<Vec<Range<usize>>> {
    found(chat.frame().filter(|frame| frame.end.is_empty())?, messages, text)
}

fn found(frame: &TurnFrame, messages: &[Value], text: &str) -> Option<Vec<Range<usize>>> {
    let mut found = Vec::new();
    let mut at = 0;
    for message in messages {
        if message["role"] != "assistant" {
            at = skip(text, at, content(message)).map_or(at, |spoken| spoken.end);
            continue;
        }
        at += text[at..].find(&frame.header)?;
        let header = if text[at..].starts_with(&frame.prompt) { &frame.prompt } else { &frame.header };
        let start = at + header.len();
        let crosses =
            |part: &str| part.contains(&frame.header) || frame.others.iter().any(|other| part.contains(other));
        // Thoughts may be a turn of their own.
        let thinks = THOUGHTS.iter().any(|name| given(message, name));
        let other = |part: &str| frame.others.iter().any(|other| part.contains(other));
        let own = |spoken: &Range<usize>| {
            let before = &text[start..spoken.start];
            if thinks { !other(before) } else { !crosses(before) }
        };
        let spoken = content(message);
        let without_thoughts = spoken.map(|said| said.rsplit_once("</think>").map_or(said, |(_, said)| said));
        let spoken = [spoken, without_thoughts].into_iter().find_map(|said| skip(text, start, said).filter(own));
        let spoken = spoken.unwrap_or(start..start);
        let rest = &text[spoken.end..];
        at = spoken.end
            + match &frame.end[..] {
                "" => frame
                    .others
                    .iter()
                    .chain([&frame.header])
                    .filter_map(|next| rest.find(next))
                    .min()
                    .unwrap_or(rest.len()),
                // A part of several ends, of which a call of a tool has its own: "<|" of "<|end|>" and "<|return|>".
                end if frame.header.starts_with(end) && given(message, "tool_calls") => return None,
                end => rest.find(end)? + end.len(),
            };
        // An end of another kind, as some templates have after a call of a tool: the end found is that of a later turn.
        if crosses(&text[spoken.end..at]) {
            return None;
        }
        found.push(start..at);
    }
    (!text[at..].contains(&frame.header)).then_some(found)
}

/// The message has this field.
fn given(message: &Value, name: &str) -> bool {
    message.get(name).is_some_and(|value| !value.is_null() && *value != "")
}

/// The text of a message; of one in parts, that of the last.
fn content(message: &Value) -> Option<&str> {
    let content = &message["content"];
    let last = || content.as_array()?.iter().rev().find_map(|part| part["text"].as_str());
    content.as_str().or_else(last)
}

/// Where `said` stands in `text`, not far after `from`. Templates trim it.
fn skip(text: &str, from: usize, said: Option<&str>) -> Option<Range<usize>> {
    /// A header, the definitions of tools and the date fit before a message.
    const NEAR: usize = 1 << 16;
    let said = said?.trim();
    let mut near = (from + said.len() + NEAR).min(text.len());
    while !text.is_char_boundary(near) {
        near += 1;
    }
    let at = from + text[from..near].find(said).filter(|_| !said.is_empty())?;
    Some(at..at + said.len())
}

/// The same by rendering the conversation up to each answer. An error if a beginning is not rendered like the whole:
/// with thoughts that the whole leaves out, it may be without them.
pub(super) fn by_prefixes(
    chat: &ChatTemplate,
    conversation: &Conversation,
    answers: &[usize],
    text: &str,
) -> Result<Vec<Range<usize>>, String> {
    prefixes(chat, conversation, answers, text).or_else(|fault| {
        let kept = conversation.with_thoughts_in(text).ok_or_else(|| fault.clone())?;
        let is_same = chat.rendered(&kept, false).is_ok_and(|rendered| rendered.text == text);
        if is_same { prefixes(chat, &kept, answers, text).map_err(|_| fault) } else { Err(fault) }
    })
}

fn prefixes(
    chat: &ChatTemplate,
    conversation: &Conversation,
    answers: &[usize],
    text: &str,
) -> Result<Vec<Range<usize>>, String> {
    let mut found = Vec::new();
    for &turn in answers {
        let with = chat.rendered(&conversation.upto(turn + 1), false)?.text;
        let message = &conversation.messages[turn];
        let answer = begins(chat, conversation, turn, &with)?.and_then(|at| {
            let (answer, rest) = (&with[at..], text.strip_prefix(&with[..at])?);
            let part = surviving_part(answer, rest).or_else(|| with_another_end(chat, message, answer, rest))?;
            Some(at..at + part.len())
        });
        found.push(answer.ok_or_else(|| match turn + 1 < conversation.messages.len() {
            true => format!(
                "has an answer (message {turn}) that the chat template renders differently when more messages follow: \
                 train on such conversations without `multiturn`"
            ),
            false => format!(
                "has an answer (message {turn}) whose start in the text of the chat template cannot be told: use another \
                 `tokenizer_chat_template`"
            ),
        })?);
    }
    Ok(found)
}

/// Where answer `turn` begins in `text`, which is rendered from the conversation up to it. None: `text` does not begin
/// as what is before the answer, or an empty list of calls may have taken the answer's place.
pub(super) fn begins(
    chat: &ChatTemplate,
    conversation: &Conversation,
    turn: usize,
    text: &str,
) -> Result<Option<usize>, String> {
    let before = &conversation.upto(turn);
    let prompt = chat.rendered(before, true)?.text;
    if text.starts_with(&prompt) {
        return Ok(Some(prompt.len()));
    }
    let calls = conversation.messages[turn].get_attr("tool_calls").ok();
    if calls.is_some_and(|calls| calls.kind() == ValueKind::Seq && calls.len() == Some(0)) {
        return Ok(None);
    }
    let plain = chat.rendered(before, false)?.text;
    let added = prompt.strip_prefix(&plain).unwrap_or_default();
    Ok(text.strip_prefix(&plain).map(|answer| plain.len() + header(added, answer)))
}

/// The length of the header of an answer: what it begins with as the generation prompt does, up to the last line or
/// mark that both have whole. Behind it, the prompt may open a mark such as `<|channel>` where the answer has another,
/// or say the first words of a thought.
fn header(prompt: &str, answer: &str) -> usize {
    let differs = answer.char_indices().zip(prompt.chars()).find(|((_, a), b)| a != b);
    let same = &answer[..differs.map_or(answer.len().min(prompt.len()), |((at, _), _)| at)];
    let whole = same.rfind(['\n', '>', ']']).or_else(|| same.rfind(':')).map_or("", |at| &same[..=at]);
    whole.len() + same[whole.len()..].chars().take_while(|c| *c == ' ').count()
}

/// The part of an answer, as rendered when it is the last message, that remains at the start of `rest`: templates of
/// thinking models drop the thoughts of earlier answers, which come first.
fn surviving_part<'a>(answer: &'a str, rest: &str) -> Option<&'a str> {
    let starts = answer.char_indices().map(|(i, _)| &answer[i..]);
    starts.into_iter().find(|part| rest.starts_with(part)).filter(|part| !part.trim().is_empty())
}

/// The part of an answer at the start of `rest`, if only what follows its content is another than when it is the last
/// message: gpt-oss ends the last answer with `<|return|>`, and earlier ones with `<|end|>`.
fn with_another_end<'a>(chat: &ChatTemplate, message: &Message, answer: &str, rest: &'a str) -> Option<&'a str> {
    let content = message.get_attr("content").ok()?;
    let said = content.as_str().map(str::trim).filter(|said| !said.is_empty())?;
    let spoken = &answer[..answer.rfind(said)? + said.len()];
    let parts = spoken.char_indices().map(|(i, _)| &spoken[i..]).take_while(|part| part.len() >= said.len());
    let upto = parts.into_iter().find(|part| rest.starts_with(part))?.len();
    let frame = chat.frame()?;
    let next = frame.others.iter().chain([&frame.header]).filter_map(|next| rest[upto..].find(next)).min()?;
    Some(&rest[..upto + next])
}
