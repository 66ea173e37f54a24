//! Attention over pages for devices without a kernel for it: a sequence's keys and values are gathered, then its rows
//! attend in one pass. Never computes itself.
use crate::Device;
use crate::ops::{AttentionPaged, AttentionPass};
use flatshard_base::Result;

pub fn in_passes(dev: &dyn Device, op: AttentionPaged) -> Result<()> {
    op.check()?;
    let AttentionPaged { shape, runs, page, qkv, kv, mut o, mut lse, mut o_pass, mut of_queries, mut gathered } = op;
    let (row, width, kv_row) = (shape.row(), shape.width(), shape.kv_row());
    let window = if shape.window == 0 { usize::MAX } else { shape.window };
    let mut ranges = Vec::new();
    for run in runs {
        let (end, rows) = (run.past + run.rows, run.first..run.first + run.rows);
        for (i, &at) in run.pages.iter().enumerate().take(end.div_ceil(page)) {
            let (to, from) = (i * page * kv_row, at as usize * page * kv_row);
            let len = page.min(end - i * page) * kv_row;
            dev.copy(kv.slice(from..from + len), gathered.reborrow().slice(to..to + len))?;
        }
        ranges.clear();
        for seen in run.past + 1..=end {
            ranges.extend([seen.saturating_sub(window) as u32, seen as u32]);
        }
        let of_rows = 2 * rows.start..2 * rows.end;
        dev.upload(bytemuck::cast_slice(&ranges), of_queries.reborrow().slice(of_rows.clone()))?;
        let out = rows.start * width..rows.end * width;
        dev.attention_pass(AttentionPass {
            shape,
            of_queries: of_queries.as_view().slice(of_rows),
            qkv: qkv.slice(rows.start * row..rows.end * row),
            kv: gathered.as_view().slice(0..end * kv_row),
            o: o_pass.reborrow().slice(out.clone()),
            lse: lse.reborrow().slice(0..shape.heads * run.rows),
        })?;
        dev.copy(o_pass.as_view().slice(out.clone()), o.reborrow().slice(out))?;
    }
    Ok(())
}
