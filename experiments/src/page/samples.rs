//! What a run's evaluations made of its prompts (`--sample-prompts`): for each prompt, its texts by step. Never draws.
use crate::curve::{Curve, PromptText};
use serde_json::{Value, json};

/// Prompts on a page, and evaluations of each: the first, the last, and some between.
const PROMPTS: usize = 32;
const STEPS: usize = 12;

/// `prompts`: each with its texts, `[step, text, cut]`; `more`: how many prompts are left out. Null without samples.
pub fn shown(curve: &Curve) -> Value {
    let Some((_, last)) = curve.samples.last_key_value() else { return Value::Null };
    // A resumed run may have another file.
    let prompts = last.iter().take(PROMPTS).enumerate().map(|(i, of)| {
        let texts = curve.samples.iter().filter_map(|(step, all)| {
            let same = |other: &&PromptText| other.prompt == of.prompt;
            let of = all.get(i).filter(same).or_else(|| all.iter().find(same))?;
            Some(json!([step, of.text, of.finish == "length"]))
        });
        let texts: Vec<Value> = texts.collect();
        let n = texts.len();
        let kept = (0..n.min(STEPS)).map(|i| if n <= STEPS { i } else { i * (n - 1) / (STEPS - 1) });
        json!({"prompt": of.prompt, "texts": kept.map(|i| &texts[i]).collect::<Vec<_>>()})
    });
    let prompts: Vec<Value> = prompts.collect();
    json!({"more": last.len() - prompts.len(), "prompts": prompts})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_has_its_texts_by_step_with_both_ends() {
        let mut curve = Curve::default();
        let mut feed = |line: Value| curve.feed(&line.to_string()).unwrap();
        let sample =
            |prompt: &str, text: String| json!({"prompt": prompt, "text": text, "finish": "stop", "tokens": 1});
        for step in 0..100 {
            let samples = [sample("a", format!("a{step}")), sample("b", format!("b{step}"))];
            feed(json!({"event": "samples", "step": step, "seconds": 0.1, "samples": samples}));
        }
        // Resumed with another prompt in place of the second.
        feed(json!({"event": "run", "resumed_from_step": 90}));
        let cut = json!({"prompt": "c", "text": "c", "finish": "length", "tokens": 1});
        feed(json!({"event": "samples", "step": 95, "seconds": 0.1, "samples": [sample("a", "end".into()), cut]}));
        let shown = shown(&curve);
        let texts = shown["prompts"][0]["texts"].as_array().unwrap();
        assert_eq!((texts.len(), &texts[0], &texts[11]), (12, &json!([0, "a0", false]), &json!([95, "end", false])));
        assert_eq!(shown["prompts"][1], json!({"prompt": "c", "texts": [[95, "c", true]]}));
        assert_eq!(shown["more"], 0);
        assert!(super::shown(&Curve::default()).is_null());
    }
}
