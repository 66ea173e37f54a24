//! Reads rows of Parquet files, row group by row group, with the values that `datasets` gives in Python. Never leaves
//! out a column that may change what a row means.
use super::{NumberedRow, ROWS, RawRow, RowUse, Rows};
use crate::base::{Error, Result, open};
use crate::data::fields::{FOREIGN, JsonRow, RowFault, RowResult};
use crate::data::place::TokenPlace;
use crate::data::recipe::{Outcome, Recipe, TokenizedRow};
use parquet::basic::{ConvertedType, LogicalType, Type as Physical};
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, reader::RowIter};
use parquet::schema::types::Type;
use serde_json::{Map, Number, Value, json};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// A row, with the columns whose values no field accepts.
struct ColumnRow<'a>(JsonRow, &'a [(String, &'static str)]);

impl RawRow for ColumnRow<'_> {
    fn tokenize(&self, recipe: &Recipe, out: &mut TokenizedRow) -> RowResult<Outcome> {
        recipe.row(&self.0, out).map_err(|e| explained(e, self.1))
    }
    fn fields(self) -> RowResult<JsonRow> {
        Ok(self.0)
    }
}

impl Rows<'_> {
    /// Row group by row group.
    pub fn parquet(&mut self, path: &Path) -> Result<()> {
        let bad = |e: ParquetError| Error::input(format!("{}: cannot be read as Parquet ({e})", path.display()));
        let file = open::file(path).map_err(|e| Error::io("open", path, e))?;
        let reader = caught(|| SerializedFileReader::new(file)).map_err(bad)?;
        let rows = reader.metadata().file_metadata().num_rows().max(0) as u64;
        if let RowUse::Count(count) = &mut self.to {
            **count += rows;
            return Ok(());
        }
        let schema = reader.metadata().file_metadata().schema().clone();
        let columns = self.columns(&schema);
        let read = columns.as_ref().unwrap_or(&schema);
        if let Some(interval) = read.get_fields().iter().find(|field| holds_interval(field)) {
            return Err(Error::in_file(path, format!("column `{}` holds intervals: remove it", interval.name())));
        }
        let others = others(read);
        let holds_json = holds_json(read);
        let rows = self.window.end.min(rows).saturating_sub(self.window.start);
        let is_read = |name: &str| read.get_fields().iter().any(|field| field.name() == name);
        let unread = schema.get_fields().iter().map(|field| field.name()).filter(|name| !is_read(name));
        if let RowUse::Tokens(_, out) = &mut self.to {
            unread.for_each(|name| out.unread(&format!("`{name}`"), rows));
        }
        let place = |n| TokenPlace::Row(path, n);
        let (mut piece, mut number): (Vec<NumberedRow<ColumnRow>>, u64) = (Vec::new(), 0);
        for group in 0..reader.num_row_groups() {
            let group = caught(|| reader.get_row_group(group)).map_err(bad)?;
            let mut rows = caught(|| RowIter::from_row_group(columns.clone(), &*group)).map_err(bad)?;
            // A damaged page corrupts everything after it: this is not the fault of one row.
            while let Some(row) = caught(|| rows.next().transpose()).map_err(bad)? {
                let mut row = row.into_columns().into_iter().map(|(name, field)| (name, value(field))).collect();
                if holds_json {
                    parse_fields(&mut row, read);
                }
                piece.push((number, Ok(ColumnRow(row, &others))));
                number += 1;
                if piece.len() == ROWS {
                    self.put(&mut piece, &place)?;
                    if self.is_over() {
                        return Ok(());
                    }
                }
            }
        }
        self.put(&mut piece, &place)
    }
}

/// The library panics on files with contradictions it does not check for.
fn caught<T>(run: impl FnOnce() -> std::result::Result<T, ParquetError>) -> std::result::Result<T, ParquetError> {
    let panicked = |_| Err(ParquetError::General("the file contradicts itself".into()));
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(panicked)
}

/// The library has no value for these.
fn holds_interval(field: &Type) -> bool {
    match field.is_primitive() {
        true => field.get_basic_info().converted_type() == ConvertedType::INTERVAL,
        false => field.get_fields().iter().any(|field| holds_interval(field)),
    }
}

fn is_json(field: &Type) -> bool {
    let info = field.get_basic_info();
    field.is_primitive()
        && (info.converted_type() == ConvertedType::JSON || matches!(info.logical_type_ref(), Some(LogicalType::Json)))
}
/// Some values are JSON, which `datasets` parses: its feature `Json`, for values of several types.
fn holds_json(field: &Type) -> bool {
    is_json(field) || field.is_group() && field.get_fields().iter().any(|field| holds_json(field))
}
/// Replaces text by the values that it is JSON of, where `field` says so.
fn parse_json(value: &mut Value, field: &Type) {
    match value {
        Value::String(text) if is_json(field) => {
            if let Ok(parsed) = serde_json::from_str(text) {
                *value = parsed;
            }
        }
        Value::Object(fields) if field.is_group() => parse_fields(fields, field),
        Value::Array(list) => {
            // A list is a group of one repeated group, whose only field is the element; a map has two.
            let inner = |of: &Type| of.is_group().then(|| of.get_fields().first().cloned()).flatten();
            let Some(repeated) = inner(field) else { return };
            let pair = repeated.is_group() && repeated.get_fields().len() == 2;
            let is_map =
                [ConvertedType::MAP, ConvertedType::MAP_KEY_VALUE].contains(&field.get_basic_info().converted_type());
            for value in list {
                match value {
                    Value::Array(entry) if is_map && pair => {
                        entry.iter_mut().zip(repeated.get_fields()).for_each(|(value, field)| parse_json(value, field));
                    }
                    value => parse_json(value, inner(&repeated).as_ref().unwrap_or(&repeated)),
                }
            }
        }
        _ => {}
    }
}
/// The same of all fields of a group.
fn parse_fields(fields: &mut JsonRow, group: &Type) {
    for field in group.get_fields() {
        fields.get_mut(field.name()).into_iter().for_each(|value| parse_json(value, field));
    }
}

/// Columns whose values no field accepts or that may be absent, with what they hold.
fn others(schema: &Type) -> Vec<(String, &'static str)> {
    let what = |field: &Type| {
        let info = field.get_basic_info();
        let physical = if field.is_primitive() { field.get_physical_type() } else { return None };
        Some(match (info.logical_type_ref(), info.converted_type(), physical) {
            (Some(LogicalType::Float16), ..) | (.., Physical::FLOAT | Physical::DOUBLE) => "numbers, null or NaN",
            (_, ConvertedType::DECIMAL, _) => "decimals",
            (_, ConvertedType::DATE, _) => "dates",
            (Some(LogicalType::Timestamp { .. }), ..) | (.., Physical::INT96) => "timestamps",
            (_, ConvertedType::TIMESTAMP_MILLIS | ConvertedType::TIMESTAMP_MICROS, _) => "timestamps",
            (Some(LogicalType::Time { .. }), ..) => "times",
            (_, ConvertedType::TIME_MILLIS | ConvertedType::TIME_MICROS, _) => "times",
            (_, ConvertedType::NONE | ConvertedType::BSON, Physical::BYTE_ARRAY | Physical::FIXED_LEN_BYTE_ARRAY) => {
                "binary data"
            }
            _ => return None,
        })
    };
    schema.get_fields().iter().filter_map(|field| Some((field.name().to_string(), what(field)?))).collect()
}

/// A fault that names such a column, with what it holds.
fn explained(fault: RowFault, others: &[(String, &'static str)]) -> RowFault {
    let start = fault.split(';').next().unwrap_or_default();
    let names = |name: &str| start.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == name);
    match others.iter().find(|(name, _)| names(name)) {
        Some((name, what)) => format!("{fault} (column `{name}` holds {what})"),
        None => fault,
    }
}

/// A value as JSON, as `datasets` gives it: a map is a list of pairs. Times, decimals and binary data become objects
/// that say so ([`FOREIGN`]), which no field accepts.
fn value(field: Field) -> Value {
    let float = |x: f64| Number::from_f64(x).map_or(Value::Null, Value::Number);
    let other = |kind: &str| json!({ FOREIGN: kind });
    match field {
        Field::Null => Value::Null,
        Field::Bool(x) => x.into(),
        Field::Byte(x) => x.into(),
        Field::Short(x) => x.into(),
        Field::Int(x) => x.into(),
        Field::Long(x) => x.into(),
        Field::UByte(x) => x.into(),
        Field::UShort(x) => x.into(),
        Field::UInt(x) => x.into(),
        Field::ULong(x) => x.into(),
        Field::Float16(x) => float(x.into()),
        Field::Float(x) => float(x.into()),
        Field::Double(x) => float(x),
        Field::Str(x) => x.into(),
        // Strings that the writer did not mark as such.
        Field::Bytes(x) => std::str::from_utf8(x.data()).map_or_else(|_| other("binary data"), Value::from),
        Field::Decimal(_) => other("a decimal"),
        Field::Date(_) => other("a date"),
        Field::TimeMillis(_) | Field::TimeMicros(_) => other("a time"),
        Field::TimestampMillis(_) | Field::TimestampMicros(_) => other("a timestamp"),
        Field::ListInternal(x) => x.elements().iter().cloned().map(value).collect(),
        Field::MapInternal(x) => x.entries().iter().cloned().map(|(k, v)| json!([value(k), value(v)])).collect(),
        Field::Group(row) => {
            let fields = row.into_columns().into_iter().map(|(name, field)| (name, value(field)));
            // Files with one schema for all messages hold null for the keys a message does not have.
            Value::Object(fields.filter(|(_, value)| !value.is_null()).collect::<Map<_, _>>())
        }
    }
}
