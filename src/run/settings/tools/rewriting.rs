//! What a file of another tool becomes: keys of ours. Never knows a key of that tool.
use crate::base::{Error, Result, quote};
use serde_json::{Map, Value};
use std::path::Path;

/// A file's keys and values.
pub type FileTree = Map<String, Value>;

/// A tree of our keys that grows, notes about keys without effect, and what is wrong with others.
pub(super) struct Rewriting<'a> {
    pub path: &'a Path,
    pub tree: FileTree,
    pub notes: Vec<String>,
    pub faults: Vec<String>,
}

impl<'a> Rewriting<'a> {
    pub fn new(path: &'a Path) -> Rewriting<'a> {
        Rewriting { path, tree: FileTree::new(), notes: Vec::new(), faults: Vec::new() }
    }
    /// Reads one key. What is wrong with it is reported together with the faults of others.
    pub fn attempt(&mut self, read: impl FnOnce(&mut Self) -> Result<()>) {
        if let Err(e) = read(self) {
            self.faults.push(e.to_string());
        }
    }
    pub fn fault(&self, what: String) -> Error {
        Error::input(format!("{}: {what}", self.path.display()))
    }
    pub fn refuse(&self, at: &str, value: &Value, why: &str) -> Error {
        self.fault(format!("{at} is {}, which has no equivalent: {why}", quote(value)))
    }
    /// Sets a key of ours for the key `at` of the file.
    pub fn set(&mut self, key: &str, value: Value, at: &str) -> Result<()> {
        match self.tree.get(key) {
            Some(other) if !other.is_null() && *other != value => Err(self.fault(format!(
                "{at} needs {key} {}, and another key needs {}: all data sets are read alike",
                quote(&value),
                quote(other)
            ))),
            _ => {
                self.tree.insert(key.into(), value);
                Ok(())
            }
        }
    }
    /// Sets a key of ours that data sets may differ in: then rows are read by their fields.
    pub fn agree(&mut self, key: &str, value: Value) {
        let differs = self.tree.get(key).is_some_and(|other| *other != value);
        self.tree.insert(key.into(), if differs { Value::Null } else { value });
    }
    /// Reads a field of rows or messages, or a role, by another name: `setting` is `rename_fields` or `rename_roles`.
    pub fn rename(&mut self, setting: &str, old: &str, new: &str) {
        if old == new {
            return;
        }
        let entry = Value::from(format!("{old}={new}"));
        let all = self.tree.entry(setting).or_insert_with(|| Value::Array(Vec::new()));
        if let Some(all) = all.as_array_mut().filter(|all| !all.contains(&entry)) {
            all.push(entry);
        }
    }
    /// Reads a role by another name. Next to ShareGPT's fields its own names need none: `has_roles` says that there are
    /// other fields.
    pub fn rename_role(&mut self, name: &str, ours: &str, has_roles: bool) {
        let known = [("human", "user"), ("gpt", "assistant"), ("observation", "tool")].contains(&(name, ours));
        if has_roles || !known {
            self.rename("rename_roles", name, ours);
        }
    }
    /// Reads messages whose role and content are in these fields.
    pub fn message_fields(&mut self, role: &str, content: &str) {
        match (role, content) {
            ("role", content) => self.rename("rename_fields", content, "content"),
            (role, content) => {
                self.rename("rename_fields", role, "from");
                self.rename("rename_fields", content, "value");
            }
        }
    }
    /// Takes out a key that asks for packing: a stream has no rows to pack.
    pub fn without_packing(&mut self, key: &str) {
        if self.tree.shift_remove(key).is_some_and(|value| value == true) {
            self.idle(key, "the texts are joined and cut into full sequences");
        }
    }
    pub fn idle(&mut self, at: &str, why: &str) {
        self.notes.push(format!("{at} has no effect here: {why}"));
    }
}

/// ChatML as both tools have it, for tokenizers with another template of their own.
pub(super) const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + \
    message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";
