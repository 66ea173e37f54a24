//! `defaults.yaml`: the settings of a run without arguments or file. Never derives a default from another setting.
use serde_json::Value;
use std::sync::LazyLock;

static DEFAULTS: LazyLock<Value> = LazyLock::new(|| {
    serde_saphyr::from_str(include_str!("defaults.yaml")).expect("defaults.yaml is compiled in; a test reads it")
});

pub fn defaults() -> &'static Value {
    &DEFAULTS
}

/// The default of a key of any section, as `--help` shows it.
pub fn default_text(defaults: &Value, key: &str) -> Option<String> {
    let value = defaults.as_object()?.values().find_map(|section| section.get(key))?;
    Some(match value {
        Value::Bool(on) => if *on { "on" } else { "off" }.to_string(),
        Value::String(s) => s.clone(),
        Value::Array(items) => {
            let text = |item: &Value| item.as_str().map_or_else(|| item.to_string(), String::from);
            items.iter().map(text).collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::sections::Settings;
    use super::*;

    #[test]
    fn defaults_are_settings() {
        let settings: Settings = serde_json::from_value(defaults().clone()).unwrap();
        assert_eq!(settings.optim.lr, Some(0.001));
        settings.check().unwrap();
        let schema = serde_json::to_value(Settings::default()).unwrap();
        for (section, body) in defaults().as_object().unwrap() {
            for key in body.as_object().unwrap().keys() {
                assert!(schema[section].get(key).is_some(), "{section}.{key} of defaults.yaml is not a setting");
            }
        }
    }
}
