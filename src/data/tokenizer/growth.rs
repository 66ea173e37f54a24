//! An upper bound on how much a `tokenizer.json` can lengthen a text, from the description of its parts: a file of a
//! few kilobytes can ask for more than all memory. Never runs any of the parts.
use serde::Deserialize;
use serde_json::Value;

/// Larger factors are refused: real tokenizers reach 1500, most stay below 20.
const MOST: u64 = 10_000;

#[derive(Deserialize)]
struct Parts {
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    decoder: Option<Value>,
}

/// The factor by which a text may grow during tokenization, or why the tokenizer is refused.
pub(super) fn growth(file: &[u8]) -> Result<u64, String> {
    let parts: Parts = serde_json::from_slice(file).map_err(|e| e.to_string())?;
    let times = |part: &Option<Value>| part.as_ref().map_or(1, times);
    let (there, back) = (times(&parts.normalizer).saturating_mul(times(&parts.pre_tokenizer)), times(&parts.decoder));
    match there.max(back) {
        most if most <= MOST => Ok(there),
        most => Err(format!(
            "{} can make a text {most} times longer; the limit is {MOST}",
            if most == there { "its normalizer and pre-tokenizer" } else { "its decoder" }
        )),
    }
}

/// The factor of a component and everything in it, which run one after another. Recognized by keys as well as by type,
/// since older files have no types.
fn times(part: &Value) -> u64 {
    let len = |value: &Value| value.as_str().map_or(0, |text| text.len() as u64);
    let inner = match part {
        Value::Array(list) => return product(list.iter()),
        Value::Object(map) => product(map.values()),
        _ => return 1,
    };
    let own = match part["type"].as_str() {
        // Measured over all of Unicode, in bytes of UTF-8.
        Some("NFKC" | "NFKD") => 11,
        Some("NFC" | "NFD") => 3,
        Some("Lowercase" | "ByteLevel") => 2,
        Some("Bert" | "BertNormalizer") => 12,
        Some("Metaspace") => 1 + 2 * len(&part["replacement"]).max(4),
        _ => 1,
    };
    let replaced = match (&part["pattern"]["String"], len(&part["content"])) {
        (Value::String(found), put) if !found.is_empty() => put.div_ceil(found.len() as u64).max(1),
        (_, put) => 1 + put, // a regular expression may match between any two characters
    };
    let charsmap = part["precompiled_charsmap"].as_str().map_or(1, longest);
    // A prefix is added to every piece between two special tokens.
    [own, replaced, 1 + len(&part["prepend"]), charsmap].into_iter().fold(inner, u64::saturating_mul)
}

fn product<'v>(parts: impl Iterator<Item = &'v Value>) -> u64 {
    parts.map(times).fold(1, u64::saturating_mul)
}

/// The longest replacement in SentencePiece's base64 table: the size of a trie, the trie, and NUL-terminated texts.
fn longest(table: &str) -> u64 {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u8> = table.bytes().filter_map(digit).collect();
    let bytes: Vec<u8> = digits
        .chunks(4)
        .flat_map(|four| {
            let word = four.iter().enumerate().fold(0u32, |word, (i, &d)| word | u32::from(d) << (18 - 6 * i));
            word.to_be_bytes()[1..].iter().take(four.len() * 6 / 8).copied().collect::<Vec<_>>()
        })
        .collect();
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return 1 };
    let texts = rest.get(u32::from_le_bytes(*size) as usize..).unwrap_or(rest);
    texts.split(|&b| b == 0).map(<[u8]>::len).max().unwrap_or(1).max(1) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn factors_multiply() {
        let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
        let sequence = |parts: Value| json!({"type": "Sequence", "normalizers": parts});
        let of = |normalizer: Value| growth(json!({"normalizer": normalizer, "model": {}}).to_string().as_bytes());
        let prepend = json!({"type": "Prepend", "prepend": "▁"});
        assert_eq!(of(Value::Null), Ok(1));
        assert_eq!(of(sequence(json!([prepend, replace(" ", "▁")]))), Ok(12)); // Llama
        assert_eq!(of(replace("``", "\"")), Ok(1));
        assert_eq!(of(json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"})), Ok(4));
        let thousand = replace("a", &"a".repeat(1000));
        assert_eq!(of(thousand.clone()), Ok(1000));
        let text = of(sequence(json!(vec![thousand.clone(); 4]))).unwrap_err();
        assert!(
            text.starts_with("its normalizer and pre-tokenizer can make a text 1000000000000 times longer"),
            "{text}"
        );
        let levels =
            json!({"pre_tokenizer": {"type": "Sequence", "pretokenizers": vec![json!({"type": "ByteLevel"}); 60]}});
        assert!(growth(levels.to_string().as_bytes()).unwrap_err().contains("1152921504606846976 times"));
        let back = json!({"decoder": {"type": "Sequence", "decoders": [thousand, thousand]}});
        assert!(growth(back.to_string().as_bytes()).unwrap_err().starts_with("its decoder"));
        // 4 bytes of trie, then "ab", "cdefg" and "h".
        assert_eq!(longest("BAAAAAAAAABhYgBjZGVmZwBoAA=="), 5);
    }
}
