//! What a part of the check says: its measurements, and what is wrong. Never opens a GPU.
use flatshard::base::{Error, Result};
use serde_json::{Value, json};
use std::process::Command;

/// What a part measured, and what is wrong with it: both are printed.
pub struct PartReport {
    pub measured: Value,
    pub wrong: Vec<String>,
}
impl PartReport {
    /// Question `i` of a part ended with an error. The questions after it are asked by `gpu_check PART FROM`, in a
    /// process of its own: one whose GPU has faulted can do no more with it.
    pub fn go_on_after(&mut self, part: &str, i: usize, name: &str, e: &Error) -> Result<()> {
        self.measured[name] = json!({"error": e.to_string()});
        self.wrong.push(format!("{name}: {e}"));
        let from = i + 1;
        let failed = |e: String| Error::Run(format!("gpu_check {part} {from}: {e}"));
        let program = std::env::current_exe().map_err(|e| failed(e.to_string()))?;
        let rest = Command::new(program).args([part, &from.to_string()]).output().map_err(|e| failed(e.to_string()))?;
        let said = String::from_utf8_lossy(&rest.stderr);
        self.wrong.extend(said.lines().map(String::from));
        let measured: Value =
            serde_json::from_slice(&rest.stdout).map_err(|e| failed(format!("{e}; it said: {said}")))?;
        if let (Value::Object(all), Value::Object(more)) = (&mut self.measured, measured) {
            all.extend(more);
        }
        Ok(())
    }
}
impl From<Value> for PartReport {
    fn from(measured: Value) -> PartReport {
        PartReport { measured, wrong: vec![] }
    }
}
