//! Turns a row with a prompt, one answer and a label into a sequence. Never knows what is learned from it.
//!
//! [Note: labeled answers] The answer is rendered and tokenized after the prompt like one of a pair (see [Note:
//! pairs]). A pair without a label is two rows, as in TRL. A row without the prompt's and the answer's fields may be a
//! conversation or an instruction, as in fine-tuning, whose last message is the answer. Token ids are
//! `prompt_input_ids` and `completion_input_ids`. The label is true or false, 1 or 0. An answer that does not fit is
//! dropped. The row ends in the bytes of the label.
use super::fields::{JsonRow, RowResult, field, present, string, truth, truth_in};
use super::format::{LabelKeys, PairKeys};
use super::pair_shapes;
use super::pairs::first_sequence;
use super::recipe::{AnsweredPrompt, Drop, Outcome, Recipe, TokenizedRow};
use super::shapes::{self, ANSWER_IDS, ID_KEYS, PAIR, Shape, both};
use super::tokenizer::Tokenizer;
use crate::device::IGNORE;

impl Recipe {
    /// See [Note: labeled answers].
    pub(super) fn labeled(&self, keys: &LabelKeys, row: &JsonRow, out: &mut TokenizedRow) -> RowResult<Outcome> {
        let tokens = [ID_KEYS[0], ANSWER_IDS].iter().any(|key| present(row, key).is_some());
        if !tokens && matches!(self.tokenizer, Tokenizer::None(_)) {
            return Ok(Outcome::Text);
        }
        if let Some(outcome) = self.unpaired(keys, row, out)? {
            return Ok(outcome);
        }
        let label = field(row, &keys.label)?;
        let wrong = || format!("has {label} as {}; true or false is expected", keys.label);
        let label = truth(label).or_else(|| truth_in(label.as_str()?)).ok_or_else(wrong)?;
        let (asked, name) = if tokens {
            (self.given(row, ANSWER_IDS, false, out)?, ANSWER_IDS)
        } else {
            let judged = self.judged(keys, row)?;
            if judged.prompt.is_empty() {
                return Err("has an empty prompt: an answer needs a prompt that it follows".into());
            }
            let asked = self.render(&judged, out)?.max(1);
            out.labels.clear();
            (asked, keys.completion.as_str())
        };
        if asked >= out.ids.len() {
            return Err(format!("has an empty answer in `{name}`: remove the row"));
        }
        if out.ids.len() > self.max_len {
            return Ok(Outcome::Dropped(Drop::TooLong));
        }
        out.labels.resize(asked, IGNORE);
        out.labels.extend(out.ids[asked..].iter().map(|&id| id as i32));
        out.end_in(f32::from(u8::from(label)));
        Ok(Outcome::Kept)
    }

    /// A pair as two rows: the chosen answer is desirable, the rejected one is not. None, if the row is no pair.
    fn unpaired(&self, keys: &LabelKeys, row: &JsonRow, out: &mut TokenizedRow) -> RowResult<Option<Outcome>> {
        let pair = PairKeys { prompt: keys.prompt.clone(), ..PairKeys::default() };
        if [&keys.label, &keys.completion].iter().any(|key| present(row, key).is_some())
            || PAIR.contains(&&keys.prompt[..])
        {
            return Ok(None);
        }
        let row = &*pair_shapes::renamed(&pair, row)?;
        if !both(row, PAIR) && !both(row, [ID_KEYS[1], ID_KEYS[2]]) {
            return Ok(None);
        }
        let outcome = self.pair(&pair, row, out)?;
        if outcome == Outcome::Kept {
            let end = first_sequence(&out.labels[1..]);
            let (ids, labels) = (out.ids.split_off(end), out.labels.split_off(end));
            let mut rejected = TokenizedRow { ids, labels, ..TokenizedRow::default() };
            rejected.end_in(0.0);
            out.end_in(1.0);
            out.other = Some(Box::new(rejected));
        }
        Ok(Some(outcome))
    }

    /// The text of the prompt and of the answer.
    fn judged(&self, keys: &LabelKeys, row: &JsonRow) -> RowResult<AnsweredPrompt> {
        match Shape::of(row, true).filter(|_| present(row, &keys.completion).is_none()) {
            Some(Shape::Instruction) if !self.format.is_chat() => {
                return Ok(AnsweredPrompt::plain(&shapes::alpaca_prompt(row)?, string(row, "output")?));
            }
            Some(Shape::Messages | Shape::Conversations | Shape::Instruction) => {}
            _ => return self.answer(&keys.prompt, &keys.completion, (false, None), row),
        }
        let turns = shapes::turns(row, (None, None))?;
        self.last_answer(row, &turns, turns.len() - 1, "the last message")
    }
}
