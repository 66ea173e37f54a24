//! `defaults.yaml`: the settings of a run without arguments or file. Never says what follows from other settings.
use serde_json::Value;

pub fn defaults() -> Value {
    serde_saphyr::from_str(include_str!("defaults.yaml")).expect("defaults.yaml is compiled in; a test reads it")
}

/// For `--help`: the default of a key, wherever it is.
pub fn default_text(defaults: &Value, key: &str) -> Option<String> {
    let value = defaults.as_object()?.values().find_map(|section| section.get(key))?;
    Some(match value {
        Value::Bool(on) => if *on { "on" } else { "off" }.to_string(),
        Value::String(s) => s.clone(),
        Value::Array(items) => items.iter().map(Value::to_string).collect::<Vec<_>>().join(" "),
        other => other.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::sections::Settings;
    use super::*;

    #[test]
    fn defaults_are_settings() {
        let settings: Settings = serde_json::from_value(defaults()).unwrap();
        assert_eq!(settings.optim.lr, Some(0.001));
        settings.check().unwrap();
        let schema = serde_json::to_value(Settings::default()).unwrap();
        for (section, body) in defaults().as_object().unwrap() {
            for key in body.as_object().unwrap().keys() {
                assert!(schema[section].get(key).is_some(), "{section}.{key} of defaults.yaml is no setting");
            }
        }
    }
}
