//! Bytes as text: two hexadecimal digits each. Never reads text back.

/// The bytes in lower case, in their order.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
