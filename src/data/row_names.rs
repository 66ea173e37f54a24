//! Fields of rows and of their messages, and roles, that have other names in a data set than here. Never looks at what
//! they hold.
use super::fields::{JsonRow, RowResult};
use super::shapes::VARIABLES;
use crate::base::{Error, Result, quote};
use serde_json::Value;
use std::borrow::Cow;

/// What is called otherwise here: pairs of the name in the data and ours.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowNames {
    fields: Vec<(String, String)>,
    roles: Vec<(String, String)>,
}

impl RowNames {
    /// Reads entries `OLD=NEW`. Errors are [`Error::Input`].
    pub fn new(fields: Option<&[String]>, roles: Option<&[String]>) -> Result<RowNames> {
        let [fields, roles] = [("rename_fields", fields), ("rename_roles", roles)].map(|(setting, entries)| {
            let mut pairs: Vec<(String, String)> = Vec::new();
            for entry in entries.unwrap_or_default() {
                let fault = |what: &str| Error::input(format!("`{setting}` {}: {what}", quote(entry)));
                let pair = entry.split_once('=').filter(|(old, new)| !old.is_empty() && !new.is_empty());
                let (old, new) = pair.ok_or_else(|| fault("it must be OLD=NEW"))?;
                if pairs.iter().any(|(other, _)| other == old) {
                    return Err(fault("its first name is there twice: remove one"));
                }
                pairs.push((old.into(), new.into()));
            }
            Ok(pairs)
        });
        Ok(RowNames { fields: fields?, roles: roles? })
    }
    /// The setting that renames something.
    pub fn setting(&self) -> &'static str {
        if self.fields.is_empty() { "rename_roles" } else { "rename_fields" }
    }
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty() && self.roles.is_empty()
    }
    /// The row with our names, also in lists of messages and in single ones.
    pub fn apply<'a>(&self, row: &'a JsonRow) -> RowResult<Cow<'a, JsonRow>> {
        if self.is_empty() {
            return Ok(Cow::Borrowed(row));
        }
        let mut renamed = self.named(row)?;
        for (_, value) in renamed.iter_mut().filter(|(key, _)| !VARIABLES.contains(&key.as_str())) {
            match value {
                Value::Array(messages) => messages.iter_mut().try_for_each(|message| self.message(message))?,
                message => self.message(message)?,
            }
        }
        Ok(Cow::Owned(renamed))
    }
    fn message(&self, message: &mut Value) -> RowResult<()> {
        let Value::Object(fields) = message else { return Ok(()) };
        *fields = self.named(fields)?;
        for key in ["role", "from"] {
            if let Some(Value::String(role)) = fields.get_mut(key)
                && let Some((_, new)) = self.roles.iter().find(|(old, _)| old == role)
            {
                role.clone_from(new);
            }
        }
        Ok(())
    }
    /// These fields under our names.
    fn named(&self, fields: &JsonRow) -> RowResult<JsonRow> {
        let mut named = JsonRow::new();
        for (key, value) in fields {
            let ours = self.fields.iter().find(|(old, _)| old == key).map_or(key, |(_, new)| new);
            match named.get(ours).filter(|other| !other.is_null()) {
                Some(_) if value.is_null() => {} // a field without a value hides none
                Some(_) => return Err(format!("has two fields for `{ours}`, after `rename_fields`: remove one")),
                None => drop(named.insert(ours.clone(), value.clone())),
            }
        }
        Ok(named)
    }
}
