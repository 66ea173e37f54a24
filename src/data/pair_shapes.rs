//! Pairs as OpenAI's fine-tuning, ms-swift and TRL's tokenized data sets write them, in the fields of ours. Never looks
//! into an answer.
use super::fields::{JsonRow, RowResult, list, present, string};
use super::format::PairKeys;
use super::shapes::{ID_KEYS, OPENAI, PAIR, TRL_IDS, both};
use serde_json::{Value, json};
use std::borrow::Cow;

/// ms-swift's rejected answers to `messages`, which end in the chosen one.
const SWIFT: [&str; 2] = ["rejected_response", "rejected_messages"];

/// The row in the fields that `keys` names by default; as it is, if it has these or none of the others.
pub(super) fn renamed<'a>(keys: &PairKeys, row: &'a JsonRow) -> RowResult<Cow<'a, JsonRow>> {
    let usual = keys.chosen == "chosen" && keys.rejected == "rejected" && keys.prompt == "prompt";
    let given = |key: &str| present(row, key).is_some();
    let [openai, trl] = [OPENAI, [TRL_IDS[1], TRL_IDS[2]]].map(|keys| both(row, keys));
    let swift = given("messages") && SWIFT.into_iter().any(given);
    if !usual || given("chosen") || !(openai || swift || trl) {
        return Ok(Cow::Borrowed(row));
    }
    let mut renamed = row.clone();
    if openai {
        for (from, to) in OPENAI.into_iter().zip(PAIR) {
            renamed.shift_remove(from).and_then(|answer| renamed.insert(to.into(), answer));
        }
        // What else is in `input` is named as unread.
        let input = renamed.shift_remove("input");
        let Some(Value::Object(mut input)) = input else {
            return Err("has no object as `input`, whose `messages` are the prompt of a preferred output".into());
        };
        for (from, to) in [("messages", "prompt"), ("tools", "tools")] {
            input.shift_remove(from).and_then(|value| renamed.insert(to.into(), value));
        }
        renamed.extend(input.into_iter().map(|(key, value)| (format!("input.{key}"), value)));
    } else if swift {
        let chosen = renamed.shift_remove("messages").unwrap_or_default();
        let rejected = match renamed.shift_remove(SWIFT[1]).filter(|value| !value.is_null()) {
            Some(messages) => messages,
            None => {
                let (answer, turns) = (string(row, SWIFT[0])?, list(&chosen, "messages")?);
                let asked = turns.split_last().map_or(&[][..], |(_, asked)| asked);
                let answer = json!({"role": "assistant", "content": answer});
                renamed.shift_remove(SWIFT[0]);
                Value::Array([asked, &[answer]].concat())
            }
        };
        renamed.insert("chosen".into(), chosen);
        renamed.insert("rejected".into(), rejected);
    } else {
        for (from, to) in TRL_IDS.into_iter().zip(ID_KEYS) {
            renamed.shift_remove(from).and_then(|ids| renamed.insert(to.into(), ids));
        }
    }
    Ok(Cow::Owned(renamed))
}
