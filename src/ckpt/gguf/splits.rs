//! How byte-level tokenizers split a text before merges apply: llama.cpp's names for the rules of published
//! tokenizer.json files, for reading and for writing. Never tokenizes.
use serde_json::{Value, json};

/// Words, with at most one other character before each, and what follows the rule for numbers: Llama 3, Qwen 2.
macro_rules! words {
    ($numbers:literal) => {
        concat!(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|",
            $numbers,
            r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}
/// Words with at most one change from upper to lower case, as in Mistral's Tekken and OpenAI's o200k.
macro_rules! cased {
    ($ending:literal, $numbers:literal) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            $ending,
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            $ending,
            "|",
            $numbers,
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )
    };
}
const MARKED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK: &str = concat!(
    "[!\"",
    r"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// What splits a text, in order, before bytes are spelled as characters.
#[derive(Clone, Copy, PartialEq)]
enum SplitSteps {
    /// GPT-2's rule, which the byte-level step has built in.
    Gpt2,
    /// Digits alone, then GPT-2's rule.
    Digits,
    /// Each pattern in turn.
    Patterns(&'static [&'static str]),
}

/// A rule that llama.cpp has a name for.
pub struct SplitRule {
    /// Its names: the first is written.
    pub names: &'static [&'static str],
    steps: SplitSteps,
    /// Whether words of the vocabulary ignore merges.
    pub ignores_merges: bool,
    /// Whether texts are in normal form C.
    pub composed: bool,
    /// Whether a text begins with a token if nothing says so.
    pub begins: bool,
}

const fn rule(names: &'static [&'static str], steps: SplitSteps, flags: [bool; 3]) -> SplitRule {
    let [ignores_merges, composed, begins] = flags;
    SplitRule { names, steps, ignores_merges, composed, begins }
}

static RULES: [SplitRule; 11] = [
    rule(&["gpt-2", "default", "phi-2", "jina-es", "jina-de", "jais", "exaone4"], SplitSteps::Gpt2, [false; 3]),
    rule(&["mpt", "olmo"], SplitSteps::Gpt2, [false, true, false]), // GPT-NeoX's
    rule(
        &["llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"],
        SplitSteps::Patterns(&[words!(r"\p{N}{1,3}")]),
        [true, false, true],
    ),
    rule(&["smaug-bpe", "dbrx", "glm4", "chatglm-bpe"], SplitSteps::Patterns(&[words!(r"\p{N}{1,3}")]), [false; 3]),
    rule(
        &["qwen2", "stablelm2", "deepseek-r1-qwen", "hunyuan"],
        SplitSteps::Patterns(&[words!(r"\p{N}")]),
        [false, true, false],
    ),
    rule(&["qwen35"], SplitSteps::Patterns(&[MARKED]), [false, true, false]),
    rule(&["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"], SplitSteps::Digits, [false; 3]),
    rule(&["tekken"], SplitSteps::Patterns(&[cased!("", r"\p{N}")]), [true, false, true]),
    rule(
        &["gpt-4o", "llama4"],
        SplitSteps::Patterns(&[cased!(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r"\p{N}{1,3}")]),
        [false; 3],
    ),
    rule(&["seed-coder"], SplitSteps::Patterns(&[SEED]), [false; 3]),
    rule(
        &["deepseek-v3", "hunyuan-dense"],
        SplitSteps::Patterns(&[r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK]),
        [false; 3],
    ),
];

impl SplitRule {
    /// The rule of llama.cpp's name.
    pub fn named(name: &str) -> Option<&'static SplitRule> {
        RULES.iter().find(|rule| rule.names.contains(&name))
    }
    pub fn names() -> impl Iterator<Item = &'static str> {
        RULES.iter().flat_map(|rule| rule.names.iter().copied())
    }

    /// The rule of a tokenizer.json. Of several, the one that treats merges as this tokenizer does; the converter knows
    /// published tokenizers by a hash of their output, and the rule also covers tokenizers that users train.
    pub fn of(json: &Value) -> Option<&'static SplitRule> {
        let pre = &json["pre_tokenizer"];
        let parts = pre["pretokenizers"].as_array().map_or(std::slice::from_ref(pre), Vec::as_slice);
        let alike = |rule: &&SplitRule| rule.splits_as(parts);
        let ignores = json["model"]["ignore_merges"] == true;
        let exact = RULES.iter().filter(alike).find(|rule| rule.ignores_merges == ignores);
        exact.or_else(|| RULES.iter().find(alike))
    }
    fn splits_as(&self, parts: &[Value]) -> bool {
        let digits = |part: &Value| part["type"] == "Digits" && part["individual_digits"] == true;
        let bytes = |part: &Value, regex: bool| part["type"] == "ByteLevel" && (part["use_regex"] != false) == regex;
        // Some files have the characters that others escape.
        let pattern =
            |part: &Value| part["pattern"]["Regex"].as_str().map(|s| s.replace('\r', r"\r").replace('\n', r"\n"));
        match (self.steps, parts) {
            (SplitSteps::Gpt2, [last]) => bytes(last, true),
            (SplitSteps::Digits, [first, last]) => digits(first) && bytes(last, true),
            (SplitSteps::Patterns(patterns), [first @ .., last]) => {
                let same =
                    |(part, own): (&Value, &&str)| part["type"] == "Split" && pattern(part).as_deref() == Some(own);
                bytes(last, false) && first.len() == patterns.len() && first.iter().zip(patterns).all(same)
            }
            _ => false,
        }
    }

    /// `pre_tokenizer` of a tokenizer.json.
    pub fn json(&self) -> Value {
        let bytes =
            |regex| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": regex});
        let split = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        let parts = match self.steps {
            SplitSteps::Gpt2 => return bytes(true),
            SplitSteps::Digits => vec![json!({"type": "Digits", "individual_digits": true}), bytes(true)],
            SplitSteps::Patterns(patterns) => patterns.iter().map(split).chain([bytes(false)]).collect(),
        };
        json!({"type": "Sequence", "pretokenizers": parts})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_is_read() {
        for rule in &RULES {
            let json = json!({"model": {"ignore_merges": rule.ignores_merges}, "pre_tokenizer": rule.json()});
            let found = SplitRule::of(&json).unwrap();
            assert_eq!(found.json(), rule.json());
            assert_eq!(found.ignores_merges, rule.ignores_merges, "{:?}", rule.names);
        }
        assert!(SplitRule::of(&json!({"pre_tokenizer": {"type": "Whitespace"}})).is_none());
        // A tokenizer of one's own that Llama 3's rule splits is not one of Llama 3's: its merges count.
        let own = |ignores: bool| json!({"model": {"ignore_merges": ignores}, "pre_tokenizer": RULES[2].json()});
        assert_eq!(
            [true, false].map(|ignores| SplitRule::of(&own(ignores)).unwrap().names[0]),
            ["llama-bpe", "smaug-bpe"]
        );
    }
}
