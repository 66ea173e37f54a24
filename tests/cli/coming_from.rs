//! docs/coming-from.md is generated from `synonyms.tsv`. Never reads a command line.
use super::spellings::shown;
use flatshard::run::settings::synonyms::{self, Synonym};
use std::fs;
use std::path::Path;

const HEAD: &str = "# Coming from other tools

```sh run
run_fsdp --dataset notes/ --learning_rate 1e-4 --warmup_ratio 0.1 --lr_scheduler_type linear --logging_steps 5 --output_dir out
run_fsdp --dataset notes/ --train.micro_batch_size 2 --train.batch_size 8 --ds.zero_stage 2 --eval.steps -1 --print-config
```

Flags of other tools are accepted, with dashes or underscores, and read as ours. At the start, the run logs how it read each of them.

- **Defaults** are always ours: `docs/differences.md`.
- **Switches** may stand alone or take `True` or `False`; `--no-x` turns them off.
- **A flag without an equivalent** is refused with the reason and our nearest flag, exit status 2. Values of `False` and 0 are accepted.
- **Two flags that give one setting different values** are refused by name. If a flag is repeated, the last one counts.

This page is generated from `src/run/settings/synonyms.tsv`; `tests/cli/coming_from.rs` checks it.
";

/// The page of docs, from the table.
fn page() -> String {
    let mut page = String::from(HEAD);
    let rows: Vec<&Synonym> = synonyms::table().iter().filter(|row| !row.tool.starts_with("flatshard's")).collect();
    let mut tools: Vec<&str> = Vec::new();
    for tool in rows.iter().flat_map(|row| row.tool.split(", ")).filter(|tool| *tool != "flatshard") {
        if !tools.contains(&tool) {
            tools.push(tool);
        }
    }
    tools.sort_by_key(|tool| tool.to_lowercase());
    for tool in tools {
        page += &format!("\n## {tool}\n\n| theirs | ours | |\n| --- | --- | --- |\n");
        let mut last = "";
        for row in rows.iter().filter(|row| row.tool.split(", ").any(|of| of == tool)) {
            if row.spelling != last {
                page += &line(row, &rows);
            }
            last = if ["flag", "idle", "refused"].contains(&row.kind) { row.spelling } else { "" };
        }
    }
    page
}
fn line(row: &Synonym, rows: &[&Synonym]) -> String {
    let code = |text: &str| format!("`{}`", text.replace('|', "\\|"));
    let flag = |pattern: &synonyms::FlagPattern| {
        let value = if pattern.values.is_empty() { String::new() } else { format!(" {}", pattern.values.join("|")) };
        pattern.names.iter().map(|name| code(&format!("--{name}{value}"))).collect::<Vec<_>>().join(", ")
    };
    let value = row.value.trim_end_matches('?');
    let value = if value == "{,}" { "A B" } else { value };
    let setting = || code(&format!("{}.{}", row.section, row.key));
    let (theirs, ours) = match row.kind {
        "section" => (format!("the section {}", code(row.spelling)), format!("the section {}", code(row.section))),
        "key" => (format!("key {}", code(row.spelling)), format!("key {}", setting())),
        "value" => (code(&shown(row, row.spelling)), code(&shown(row, value))),
        "flag" => {
            let with = row.with.as_ref().map_or(String::new(), |with| format!(" with {}", flag(with)));
            let same = rows.iter().filter(|of| of.kind == "flag" && of.spelling == row.spelling && of.tool == row.tool);
            let ours = same.map(|row| {
                let value = row.value.trim_end_matches('?').replace("{}", "X");
                let value = if row.counts_samples() { "X/G".into() } else { value };
                code(&match row.key.split_once('.') {
                    Some((_, half)) => format!("{}, value {}", shown(row, ""), half.parse::<usize>().unwrap() + 1),
                    None if ["{0}", "{1}"].contains(&&*value) => {
                        format!("{}, word {}", shown(row, ""), if value == "{0}" { 1 } else { 2 })
                    }
                    None if value == "{,}" => format!("{}, split at commas", shown(row, "")),
                    None => shown(row, &value),
                })
            });
            (flag(&row.flag) + &with, ours.collect::<Vec<_>>().join(" "))
        }
        kind => {
            let with = row.with.as_ref().map_or(String::new(), |with| format!(" with {}", flag(with)));
            let nearest =
                if row.key.is_empty() { String::new() } else { format!("; nearest {}", code(&shown(row, value))) };
            (flag(&row.flag) + &with, if kind == "idle" { "no effect".into() } else { format!("refused{nearest}") })
        }
    };
    let gives_way = if row.is_weak() { "gives way to other flags" } else { "" };
    let why = if row.why.is_empty() { gives_way } else { row.why };
    format!("| {theirs} | {ours} | {why} |\n")
}

#[test]
fn the_page_is_generated_from_the_table() {
    let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join("coming-from.md");
    fs::write(&made, page()).unwrap();
    let there =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/coming-from.md")).unwrap_or_default();
    assert!(there == page(), "docs/coming-from.md is not what synonyms.tsv gives: copy {} over it", made.display());
}
