//! The tokenizer and its chat template: the settings', or else those of the model. Never reads a row.
use crate::base::{Error, Result, open};
use crate::ckpt;
use crate::data::{Tokenizer, tokenizer};
use crate::run::settings::Settings;
use crate::run::settings::data::DataSettings;
use std::path::Path;

/// The tokenizer of the settings, or that of an adapter, or the model directory's, or bytes for a model of bytes.
/// One that is missing or cannot be read is an error only once text must be tokenized.
pub fn tokenizer(s: &mut Settings) -> Tokenizer {
    let mut dirs = [&s.lora.merge, &s.lora.adapter, &s.model.pretrain].into_iter().flatten();
    let dir = dirs.find(|dir| dir.join(tokenizer::FILES[0]).is_file()).map(|dir| dir.display().to_string());
    let of_text = s.model.pretrain.as_deref().filter(|model| !ckpt::hf::is_of_bytes(model));
    if let (None, None, Some(model)) = (&dir, &s.data.tokenizer, of_text) {
        return Tokenizer::none(&Error::input(format!(
            "{}: the model has no {}, and its config does not say that it was trained on bytes: name its tokenizer \
             with --tokenizer (a directory, a name of the hub, or bytes), or use token ids",
            model.display(),
            tokenizer::FILES[0]
        )));
    }
    let name = s.data.tokenizer.get_or_insert(dir.unwrap_or_else(|| "bytes".into()));
    Tokenizer::from_name(name).unwrap_or_else(|why| Tokenizer::none(&why))
}

/// The tokenizer of a run that resumes from the checkpoint in `dir`: with the chat template that the run was trained
/// with so far, unless the settings have one.
pub fn resumed(tokenizer: Tokenizer, d: &DataSettings, dir: Option<&Path>) -> Result<Tokenizer> {
    let dir = dir.filter(|_| d.tokenizer_chat_template.is_none() && matches!(tokenizer, Tokenizer::File(_)));
    let trained = dir.map(tokenizer::default_of).transpose()?.flatten();
    Ok(trained.map_or(tokenizer.clone(), |text| tokenizer.with_trained_template(text)))
}

/// The chat template in use: that of the settings (the name of one of the tokenizer's, a file, or Jinja text), or the
/// tokenizer's default one.
pub fn template(d: &DataSettings, tokenizer: &Tokenizer) -> Result<Option<String>> {
    let Some(given) = &d.tokenizer_chat_template else {
        return Ok(tokenizer.template(tokenizer::DEFAULT).ok().map(str::to_owned));
    };
    let bad = |what: String| Error::input(format!("--tokenizer-chat-template {given}: {what}"));
    match tokenizer.template(given) {
        Ok(text) => Ok(Some(text.into())),
        Err(_) if Path::new(given).is_file() => {
            let text = open::read(Path::new(given)).map_err(|e| bad(e.to_string()))?;
            String::from_utf8(text).map(Some).map_err(|_| bad("is not UTF-8".into()))
        }
        Err(_) if given.contains('{') => Ok(Some(given.clone())),
        Err(names) => Err(bad(format!(
            "is neither a file nor Jinja text, and not among the tokenizer's templates ({})",
            listed(&names)
        ))),
    }
}

/// The name of the template that transformers takes for rows with tools, where none is named.
pub const TOOL_USE: &str = "tool_use";

/// The text of that template, if rows with tools use it.
pub fn tool_use<'a>(d: &DataSettings, tokenizer: &'a Tokenizer) -> Option<&'a str> {
    // A checkpoint's default template is the one that all rows were trained with.
    let own = d.tokenizer_chat_template.is_none() && !tokenizer.has_trained_template();
    tokenizer.template(TOOL_USE).ok().filter(|_| own)
}

/// The chat template that saved models hold as their default one: the template in use, or for a merge the adapter's.
pub fn saved_template(s: &Settings, tokenizer: &Tokenizer) -> Result<Option<String>> {
    match (&s.lora.merge, &s.data.tokenizer_chat_template, tokenizer) {
        (Some(adapter), ..) => tokenizer::default_of(adapter),
        (None, None, Tokenizer::Bytes) => Ok(None), // has no files, and its template is as good as any
        _ => template(&s.data, tokenizer),
    }
}

/// Names of templates, in a message.
pub fn listed(names: &[&str]) -> String {
    if names.is_empty() { "none".into() } else { names.join(", ") }
}
