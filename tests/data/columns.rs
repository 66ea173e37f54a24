//! Rows of Parquet files and of tables mean what the same rows of JSON mean: every column is seen, not only those that
//! are learned.
use super::sft::{chatml, keys, open};
use super::*;
use flatshard::data::{LabelKeys, PairKeys, Preferences};

fn sft() -> Format {
    Format { chat: chatml(), ..Format::default() }
}
fn with_system(format: Format) -> Format {
    Format { system_key: Some("system_prompt".into()), apply_chat_template: true, ..format }
}
fn pairs() -> Format {
    Format { preferences: Some(Preferences::Pairs(PairKeys::default())), ..sft() }
}
fn labels() -> Format {
    Format { preferences: Some(Preferences::Labels(LabelKeys::default())), ..sft() }
}

#[test]
fn rows_of_parquet_are_those_of_json() {
    let dir = tokens::golden("parquet").join("columns");
    let sees = |name: &str, format: Format| {
        let files = Files::with(name, fs::read(dir.join(name)).unwrap());
        match open(&files, name, 200, format) {
            Ok(data) => {
                let rows = rows(&data).into_iter().map(|(ids, targets)| (Tokenizer::Bytes.decode(&ids), targets));
                let report = data.report().to_string();
                Ok((rows.collect::<Vec<_>>(), report.split_once("not read: ").map(|(_, unread)| unread.to_string())))
            }
            Err(fault) => {
                let place = format!("{}: ", files.path(name).display());
                let fault = fault.to_string().replace(&place, "");
                Err(fault.replace("row 0 (from 0)", "line 1"))
            }
        }
    };
    let of_keys = || Format { chat: chatml(), ..keys("q", Some("a")) };
    for (name, format, expected) in [
        ("system", with_system(of_keys()), "<|im_start|>system\ns<|im_end|>"),
        ("system_pair", with_system(pairs()), "<|im_start|>system\ns<|im_end|>"),
        ("system", of_keys(), "`id` in 1 row, `system_prompt`"),
        ("undesired", sft(), "the undesirable ones would be learned"),
        ("undesired_messages", sft(), "the undesirable ones would be learned"),
        ("image", sft(), "only text is trained on"),
        ("no_image", sft(), "user\nq<|im_end|>"),
        ("image_pair", pairs(), "only text is trained on"),
        ("packed", sft(), "holds several samples"),
        ("packed_segments", sft(), "holds several samples"),
        ("weights", sft(), "tokens have a loss or none"),
        ("swift_pair", pairs(), "assistant\nb<|im_end|>"),
        ("swift_messages", pairs(), "assistant\nb<|im_end|>"),
        ("openai_pair", pairs(), "assistant\nb<|im_end|>"),
        ("unnamed", sft(), "its keys are: task, problem, solution. Name the prompt and response fields"),
        ("unnamed", pairs(), "its keys are: task, problem, solution."),
        ("unnamed", labels(), "its keys are: task, problem, solution"),
        ("talk", sft(), "`dialogue` holds messages: `input_key: dialogue` with `apply_chat_template` reads them"),
        ("unnamed", Format { pretrain_mode: true, ..keys("problem", None) }, "`solution` in 1 row, `task`"),
    ] {
        let columns = sees(&format!("{name}.parquet"), format.clone());
        assert_eq!(columns, sees(&format!("{name}.jsonl"), format), "{name}");
        let said = match columns {
            Ok((rows, unread)) => rows.into_iter().map(|(text, _)| text).chain(unread).collect::<String>(),
            Err(fault) => fault,
        };
        assert!(said.contains(expected), "{name}: {said}");
    }
}

#[test]
fn columns_next_to_token_ids_are_lists_in_tables_too() {
    for (column, list, expected) in [
        ("cu_seqlens", "[0, 2, 4]", "holds several samples"),
        ("segment_ids", "[0, 0, 1, 1]", "holds several samples"),
        ("token_weights", "[0.0, 1.0, 1.0, 1.0]", "tokens have a loss or none"),
        ("shift_labels", "[2, 3, 4, -100]", "not shifted"),
        ("prompt_mask", "[1, 1, 0, 0]", "trainers differ in what its 0 and 1 mean"),
    ] {
        let files = Files::with("t.csv", format!("input_ids,{column}\n\"[1, 2, 3, 4]\",\"{list}\"\n"));
        refused(open(&files, "t.csv", 200, sft()), &["line 2", expected]);
    }
}
