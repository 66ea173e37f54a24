//! The order in which CTAs take their work, which no value depends on, only speed: what each CTA alone writes, and in
//! which order it copies tiles.
use super::launch::Bench;
use super::reference::{Inputs, Outputs, Shape};
use std::cell::RefCell;

/// All CTAs but the `index`-th return at once.
fn alone(index: usize, text: String) -> String {
    let entry = text.find(".visible .entry").unwrap();
    let body = entry + text[entry..].find("\n{\n").unwrap() + 3;
    let skip = format!(
        "{{ .reg .u32 %here, %wide; .reg .pred %other; mov.u32 %here, %ctaid.y; mov.u32 %wide, %nctaid.x;
        mul.lo.u32 %here, %here, %wide; mov.u32 %wide, %ctaid.x; add.u32 %here, %here, %wide;
        setp.ne.u32 %other, %here, {index}; @%other ret; }}\n"
    );
    format!("{}{skip}{}", &text[..body], &text[body..])
}
fn replaced(text: &str, old: &str, new: &str) -> String {
    assert_eq!(text.matches(old).count(), 1, "{old}");
    text.replace(old, new)
}
/// (head, tile) of the rows with a value, in rows of `heads` heads: they must be those of one tile of one head.
fn written(values: &[f64], heads: usize, dim: usize, tile: usize) -> (usize, usize) {
    let rows = values.chunks(dim).enumerate().filter(|(_, row)| row.iter().any(|x| *x != 0.0));
    let found: Vec<(usize, usize)> = rows.map(|(i, _)| (i % heads, i / heads)).collect();
    let n = values.len() / dim / heads;
    let (head, tile_of) = (found[0].0, found[0].1 / tile);
    let all = (tile_of * tile..n.min((tile_of + 1) * tile)).map(|row| (head, row));
    assert!(found.iter().copied().eq(all), "{found:?}");
    (head, tile_of)
}

/// Forward: sections of the heads of `section` key heads, in a section the last tile first, with all its heads before
/// the next tile.
fn forward(shape: &Shape, section: usize, change: &dyn Fn(String) -> String) -> Vec<(usize, usize)> {
    let (x, turns) = (Inputs::new(shape), RefCell::new(vec![]));
    let n = shape.rows().0.len();
    let name = format!("attention_hopper_forward_bf16_{}", shape.head_dim);
    let of = |index: usize| {
        // 4 bytes of keys and values per element, of an f32's worth of cache.
        let cache = (section * n * shape.head_dim).to_string();
        let plant = |text: String| alone(index, change(replaced(&text, "8388608", &cache)));
        // A CTA for each tile: further ones that it draws are none.
        let bench = Bench {
            plant: Some((&name, &plant)),
            ctas: usize::MAX,
            turns: Some(&turns),
            ..Bench::new("bf16", shape, 0)
        };
        let Outputs { o, .. } = bench.run(&x, None, 0.0).unwrap_or_else(|report| panic!("{report}")).0;
        written(&o, shape.heads, shape.head_dim, 128)
    };
    (0..n.div_ceil(128) * shape.heads).map(of).collect()
}
#[test]
fn forward_takes_long_work_first_in_sections() {
    let same = |text: String| text;
    for (heads, kv_heads, section) in [(4, 2, 1), (4, 2, 2), (3, 3, 2)] {
        let shape = Shape::packed(heads, kv_heads, 64, &[0, 300]);
        let (tiles, wide) = (3, section * heads / kv_heads);
        let sections = (0..heads).step_by(wide).map(|first| first..(first + wide).min(heads));
        let documented: Vec<(usize, usize)> = sections
            .flat_map(|heads| (0..tiles).rev().flat_map(move |tile| heads.clone().map(move |head| (head, tile))))
            .collect();
        assert_eq!(forward(&shape, section, &same), documented, "{heads} {kv_heads} {section}");
        // The same work, short tiles first, is noticed.
        let swapped = |text: String| replaced(&text, "sub.u32                 %first, %tiles, %first;\n", "");
        let swapped = |text: String| replaced(&swapped(text), "sub.u32                 %first, %first, 1;\n", "");
        assert_ne!(forward(&shape, section, &swapped), documented);
    }
}

/// A ticket's tile of keys and its head; and the tiles of queries and their heads, as the producer copies them.
fn backward(shape: &Shape, ticket: u32, change: &dyn Fn(String) -> String) -> ((usize, usize), Vec<(usize, usize)>) {
    let x = Inputs::new(shape);
    let (n, name) = (shape.rows().0.len(), format!("attention_hopper_backward_bf16_{}", shape.head_dim));
    let ones = vec![1.0; shape.heads * n];
    // All turns have come; notes of the producer follow.
    let words = 1 + shape.heads * n.div_ceil(64);
    let notes = words.next_multiple_of(2);
    let mut turns = vec![1 << 20; notes];
    turns[0] = ticket;
    turns.resize(notes + 2 * 64, u32::MAX);
    let turns = RefCell::new(turns);
    let plant = |text: String| {
        let note = "cvt.u64.u32 %note, %other_note; add.u64 %note, %note, %turns;
            st.global.v2.u32 [%note], {%c, %query_head}; add.u32 %other_note, %other_note, 8;";
        let text = replaced(&text, "COPY:\n", &format!("mov.u32 %other_note, {};\nCOPY:\n{note}\n", 4 * notes));
        let text = replaced(
            &text,
            ".reg .pred              %keys_kept,",
            ".reg .u32 %other_note; .reg .u64 %note; .reg .pred %keys_kept,",
        );
        alone(0, change(text))
    };
    let bench = Bench { plant: Some((&name, &plant)), turns: Some(&turns), ..Bench::new("bf16", shape, 0) };
    let given: [&[f64]; 2] = [&ones, &ones];
    let Outputs { dv, .. } = bench.run(&x, Some(given), 0.0).unwrap_or_else(|report| panic!("{report}")).0;
    let noted = turns.borrow()[notes..].as_chunks::<2>().0.to_vec();
    let copied = noted.iter().take_while(|[c, _]| *c != u32::MAX).map(|&[c, head]| (c as usize / 64, head as usize));
    (written(&dv, shape.kv_heads, shape.head_dim, 128), copied.collect())
}
#[test]
fn tickets_take_the_first_keys_first_and_the_last_queries_first() {
    let shape = Shape::packed(4, 2, 64, &[0, 300]);
    let same = |text: String| text;
    let order: Vec<_> = (0..6).map(|ticket| backward(&shape, ticket, &same)).collect();
    for (ticket, (key_tile, copied)) in order.iter().enumerate() {
        let (tile, head) = (ticket / 2, ticket % 2);
        assert_eq!(*key_tile, (head, tile), "ticket {ticket}");
        // Queries from the last tile down to the keys' own; the heads of the group at each.
        let documented: Vec<_> =
            (2 * tile..5).rev().flat_map(|queries| [2 * head, 2 * head + 1].map(|head| (queries, head))).collect();
        assert_eq!(*copied, documented, "ticket {ticket}");
    }
    // Heads before keys: another order of tickets, which gives the same values.
    let swapped = |text: String| {
        let text = replaced(
            &text,
            "div.u32             %first, %t, %kv_heads;",
            "add.u32 %head, %keys, 127; shr.u32 %head, %head, 7; rem.u32 %first, %t, %head;",
        );
        let text = replaced(&text, "mul.lo.u32          %head, %first, %kv_heads;", "div.u32 %head, %t, %head;");
        replaced(&text, "sub.u32             %head, %t, %head;", "")
    };
    assert_ne!(backward(&shape, 1, &swapped).0, order[1].0);
}
