//! An SVG picture as a PNG file, at twice its size, with a font that is in the binary. Reads nothing from the system.
use flatshard::base::{Error, Result};
use resvg::{tiny_skia, usvg};
use std::path::Path;
use std::sync::Arc;

const ZOOM: f32 = 2.0;

pub fn write(svg: &str, path: &Path) -> Result<()> {
    let failed = |what: String| Error::op("draw", format!("{}: {what}", path.display()));
    let mut fonts = usvg::fontdb::Database::new();
    for font in [dejavu::sans::regular(), dejavu::sans::bold()] {
        fonts.load_font_data(font.to_vec());
    }
    let options = usvg::Options { fontdb: Arc::new(fonts), font_family: "DejaVu Sans".into(), ..Default::default() };
    let tree = usvg::Tree::from_str(svg, &options).map_err(|e| failed(e.to_string()))?;
    let (width, height) = ((tree.size().width() * ZOOM).ceil() as u32, (tree.size().height() * ZOOM).ceil() as u32);
    let mut picture =
        tiny_skia::Pixmap::new(width, height).ok_or_else(|| failed(format!("{width} x {height} pixels")))?;
    resvg::render(&tree, tiny_skia::Transform::from_scale(ZOOM, ZOOM), &mut picture.as_mut());
    let bytes = picture.encode_png().map_err(|e| failed(e.to_string()))?;
    std::fs::write(path, bytes).map_err(|e| Error::io("write", path, e))
}
