//! Many texts at once: waiting ones enter as soon as finished ones leave (continuous batching), keys and values are in
//! pages, and what the samples of a prompt have in common is computed once: a mixer's state is copied for each. Weights
//! are gathered once per pass, for all texts. Never chooses how long a text is beyond its limits: the caller does,
//! token by token.
//!
//! A pass has rows of all texts: the next token of each that is being written, and of new ones as much of the prompt as
//! fits. A row's bits do not depend on the others, nor does the number that a token is drawn with, so a text is the
//! same alone and among others, on any mesh.
use super::draw::{Sampling, pick};
use crate::base::{Category, DType, Error, Result};
use crate::comm::exchange::Exchange;
use crate::comm::{Axis, Mesh};
use crate::device::ops::PagedRows;
use crate::device::{Buf, Device};
use crate::nn::{Batch, CacheSize, Checkpointing, Decoder, Groups, PAGE, ParamStore, Workspace, WorkspaceOptions};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// How much a sampler does at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplerSize {
    /// Maximum rows of a pass, and with it texts that are written at once.
    pub rows: usize,
    /// Maximum tokens of a prompt and its text.
    pub longest: usize,
    /// Pages of keys and values, of [`PAGE`] tokens.
    pub pages: usize,
    /// Maximum texts at once if each has a state of its own, for mixers that have one.
    pub texts: usize,
}

impl SamplerSize {
    /// Rows of a pass over prompts: more take no less time per row.
    const ROWS: usize = 512;

    /// For one text.
    pub fn of_one(prompt: usize, count: usize) -> SamplerSize {
        SamplerSize::of_many(prompt, count, 1)
    }
    /// For prompts of these lengths, with texts of up to `count` tokens, and fewer where a prompt leaves no room for
    /// them within `max_len`: the prompt and the count of [`SamplerSize::of_many`].
    pub fn fitted(prompts: impl Iterator<Item = usize> + Clone, count: usize, max_len: usize) -> (usize, usize) {
        let count = count.min(max_len.saturating_sub(prompts.clone().min().unwrap_or(0)));
        let longest = prompts.map(|prompt| (prompt + count).min(max_len)).max().unwrap_or(count);
        ((longest - count).max(1), count)
    }
    /// For what either is for.
    pub fn or_larger(self, other: SamplerSize) -> SamplerSize {
        SamplerSize {
            rows: self.rows.max(other.rows),
            longest: self.longest.max(other.longest),
            pages: self.pages.max(other.pages),
            texts: self.texts.max(other.texts),
        }
    }
    /// For prompts of up to `prompt` tokens with texts of up to `count`, `texts` at once that have no page in common.
    pub fn of_many(prompt: usize, count: usize, texts: usize) -> SamplerSize {
        let longest = prompt + count;
        let rows = texts.max((texts * prompt).min(SamplerSize::ROWS)).max(1);
        SamplerSize { rows, longest, pages: texts * CacheSize::pages_of(longest) + 1, texts }
    }
}

/// A prompt, and how many texts continue it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    /// What its draws depend on, besides the seed and the step.
    pub id: u64,
    pub tokens: Vec<u32>,
    pub samples: usize,
}

impl Prompt {
    pub fn new(id: u64, tokens: Vec<u32>, samples: usize) -> Prompt {
        Prompt { id, tokens, samples }
    }
}

/// A text as it is being written.
pub struct Sampled<'a> {
    /// Index of the prompt, and of the text among its samples.
    pub prompt: usize,
    pub sample: usize,
    /// Its tokens so far; the last one is new.
    pub ids: &'a [u32],
}

/// A sampled text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SampledText {
    pub prompt: usize,
    pub sample: usize,
    pub ids: Vec<u32>,
    /// The log-probability of each token, at temperature 1 and without filters.
    pub logprobs: Vec<f32>,
    /// The caller ended it, rather than a limit of its length.
    pub ended: bool,
}

/// Where the keys and values of a text are, and its state.
struct TextPlace {
    /// For the longest that it can get.
    pages: Vec<u32>,
    slot: usize,
}

/// Texts of a prompt whose tokens are the same so far, with their places. All but the first are alike: what comes next
/// tells them apart.
struct Live {
    /// The number of the prompt.
    id: u64,
    tokens: Vec<u32>,
    /// Tokens that are cached.
    cached: usize,
    place: TextPlace,
    texts: Vec<SampledText>,
    /// The further texts' own, without the pages that they share.
    spare: Vec<TextPlace>,
}

/// What is asked of a sampler, besides the prompts.
struct SampleRequest<'a> {
    /// Maximum tokens of a text.
    count: usize,
    sampling: &'a Sampling,
    /// Gets each new token, and returns whether the text continues.
    next: &'a mut dyn FnMut(&Sampled) -> bool,
    /// There is one text: what is cached of it stays for the next.
    alone: bool,
}

/// A text's rows in a pass.
struct LiveRows {
    /// Its index among the live texts.
    live: usize,
    first: usize,
    count: usize,
    /// Tokens before them that are cached.
    past: usize,
}

/// The rows of a pass.
#[derive(Default)]
struct PassRows {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    of_texts: Vec<LiveRows>,
    /// Rows whose next tokens are drawn, and for which of a live text's samples.
    wanted: Vec<usize>,
    drawn_for: Vec<(usize, usize)>,
}

impl PassRows {
    /// As many rows of `live` as there is room for: `most`. Positions of models with another rotation for texts longer
    /// than `original` say which it is.
    fn new(live: &[Live], most: usize, original: Option<usize>) -> PassRows {
        let mut pass = PassRows::default();
        for (i, of) in live.iter().enumerate() {
            let (first, left) = (pass.tokens.len(), of.tokens.len() - of.cached);
            let count = left.min(most - first);
            if count == 0 {
                break;
            }
            let end = of.cached + count;
            pass.tokens.extend_from_slice(&of.tokens[of.cached..end]);
            let long = original.is_some_and(|original| of.tokens.len() > original);
            let position = |at: usize| if original.is_some() { 2 * at + usize::from(long) } else { at } as u32;
            pass.positions.extend((of.cached..end).map(position));
            pass.of_texts.push(LiveRows { live: i, first, count, past: of.cached });
            if end == of.tokens.len() {
                pass.wanted.extend(of.texts.iter().map(|_| first + count - 1));
                pass.drawn_for.extend((0..of.texts.len()).map(|text| (i, text)));
            }
        }
        pass
    }
}

/// Which pages and slots are in use.
struct Pages {
    free: Vec<u32>,
    free_slots: Vec<usize>,
    /// How many texts hold a page.
    held: Vec<u32>,
}

impl Pages {
    fn take(&mut self, count: usize) -> Vec<u32> {
        let taken = self.free.split_off(self.free.len() - count);
        taken.iter().for_each(|&page| self.held[page as usize] = 1);
        taken
    }
    fn vacate(&mut self, place: TextPlace) {
        self.free_slots.push(place.slot);
        self.give_back(place.pages);
    }
    fn give_back(&mut self, pages: Vec<u32>) {
        for page in pages {
            self.held[page as usize] -= 1;
            if self.held[page as usize] == 0 {
                self.free.push(page);
            }
        }
    }
}

/// The buffers of sampling, for any weights.
pub(super) struct Sampler {
    decoder: Decoder,
    workspace: Workspace,
    size: SamplerSize,
    /// u32 (rows) each.
    tokens: Buf,
    positions: Buf,
    nothing: [Buf; 2],
    /// Whether ranks have work left; with several.
    work: Option<Exchange>,
    pages: Pages,
    /// The last text of one that was alone.
    kept: Option<(Vec<u32>, TextPlace)>,
}

impl Sampler {
    pub fn new(dev: &dyn Device, mesh: &Mesh, decoder: Decoder, dtype: DType, size: &SamplerSize) -> Result<Sampler> {
        let &SamplerSize { rows, longest, pages, texts } = size;
        // The first page and the first slot are those of ranks without a text.
        let has_states = decoder.spec().recurrence.is_some();
        let slots = 1 + if has_states { rows.min(texts) } else { rows };
        let options = WorkspaceOptions { tokens: rows, dtype, checkpoint: Checkpointing::Off, train: false };
        let mut workspace = decoder.workspace(dev, &Groups::of(mesh), &options)?;
        decoder.remember(dev, &mut workspace, &CacheSize { pages, rows, longest, slots })?;
        let _for = dev.meter().purpose("sampler");
        let alloc = |dtype, len| dev.alloc(dtype, len, Category::Other);
        let several = mesh.group(Axis::World).size() > 1;
        Ok(Sampler {
            decoder,
            workspace,
            size: *size,
            tokens: alloc(DType::U32, rows)?,
            positions: alloc(DType::U32, rows)?,
            nothing: [alloc(DType::I32, 0)?, alloc(DType::U32, 0)?],
            work: several.then(|| Exchange::new(dev, mesh.group(Axis::World).clone(), "sampling", 1)).transpose()?,
            pages: Pages {
                free: (1..pages as u32).rev().collect(),
                free_slots: (1..slots).rev().collect(),
                held: vec![0; pages],
            },
            kept: None,
        })
    }
    /// Drops what is cached of earlier texts: the weights may be others.
    pub fn forget(&mut self) {
        if let Some((_, place)) = self.kept.take() {
            self.pages.vacate(place);
        }
    }

    /// Samples all prompts, which all ranks pass: data-parallel ranks share them, by the length of their texts. Returns
    /// the texts of all ranks, by prompt and sample. `next` is called on the rank that writes a text, for each of its
    /// tokens, and returns whether it continues.
    pub fn sample(
        &mut self,
        of: (&dyn Device, &Mesh, &mut dyn ParamStore),
        prompts: &[Prompt],
        count: usize,
        sampling: &Sampling,
        next: &mut dyn FnMut(&Sampled) -> bool,
    ) -> Result<Vec<SampledText>> {
        let (dev, mesh, store) = of;
        let mut order: Vec<usize> = (0..prompts.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse((prompts[i].tokens.len() + count) * prompts[i].samples));
        let (rank, ranks) = (mesh.group(Axis::Dp).rank(), mesh.group(Axis::Dp).size());
        let mut own: Vec<usize> = order.into_iter().skip(rank).step_by(ranks).collect();
        own.sort_unstable();
        let mine: Vec<(usize, &Prompt)> = own.iter().map(|&i| (i, &prompts[i])).collect();
        let texts = self.run((dev, mesh, store), &mine, count, sampling, next)?;
        share(dev, mesh, texts)
    }
    /// Samples this rank's own prompts, without telling others.
    pub fn sample_own(
        &mut self,
        of: (&dyn Device, &Mesh, &mut dyn ParamStore),
        prompts: &[Prompt],
        count: usize,
        sampling: &Sampling,
        next: &mut dyn FnMut(&Sampled) -> bool,
    ) -> Result<Vec<SampledText>> {
        let mine: Vec<(usize, &Prompt)> = prompts.iter().enumerate().collect();
        self.run(of, &mine, count, sampling, next)
    }

    fn run(
        &mut self,
        (dev, _, store): (&dyn Device, &Mesh, &mut dyn ParamStore),
        prompts: &[(usize, &Prompt)],
        count: usize,
        sampling: &Sampling,
        next: &mut dyn FnMut(&Sampled) -> bool,
    ) -> Result<Vec<SampledText>> {
        let SamplerSize { longest, .. } = self.size;
        if let Some((_, bad)) = prompts.iter().find(|(_, p)| p.tokens.is_empty() || p.tokens.len() > longest) {
            let n = bad.tokens.len();
            return Err(Error::op("generate", format!("a prompt of {n} tokens; 1 to {longest} are possible")));
        }
        let alone = prompts.len() == 1 && prompts[0].1.samples == 1;
        if !alone {
            self.forget();
        }
        let mut asked = SampleRequest { count, sampling, next, alone };
        let mut waiting: VecDeque<(usize, &Prompt, usize)> = prompts.iter().map(|&(i, p)| (i, p, 0)).collect();
        let (mut live, mut done): (Vec<Live>, Vec<SampledText>) = (Vec::new(), Vec::new());
        loop {
            while let Some((index, prompt, first)) = waiting.front_mut() {
                let room = count.min(longest - prompt.tokens.len());
                if room == 0 || prompt.samples == *first {
                    let rest = *first..prompt.samples;
                    done.extend(rest.map(|sample| SampledText { prompt: *index, sample, ..SampledText::default() }));
                    waiting.pop_front();
                    continue;
                }
                let Some(admitted) = self.admit(*index, prompt, *first, room) else { break };
                *first += admitted.texts.len();
                live.push(admitted);
            }
            if live.is_empty() && !waiting.is_empty() {
                return Err(Error::op("generate", "the cache has no room for one text"));
            }
            let works = !live.is_empty();
            if !self.anyone(dev, works)? {
                break;
            }
            self.pass((dev, &mut *store), &mut live, &mut asked, &mut done)?;
        }
        done.sort_by_key(|text| (text.prompt, text.sample));
        Ok(done)
    }

    /// Whether any rank has work left.
    fn anyone(&mut self, dev: &dyn Device, works: bool) -> Result<bool> {
        let Some(work) = &mut self.work else { return Ok(works) };
        Ok(work.gather(dev, &[u64::from(works)])?.contains(&1))
    }

    /// Admits as many samples of a prompt as there is room for, from `first` on. Each has pages for `room` more tokens.
    fn admit(&mut self, index: usize, prompt: &Prompt, first: usize, room: usize) -> Option<Live> {
        let (n, kept) = (prompt.tokens.len(), self.kept.take());
        let spec = self.decoder.spec();
        let (mut cached, mut place) = (0, None);
        if let Some((text, held)) = kept {
            let same = text.iter().zip(&prompt.tokens).take_while(|(a, b)| a == b).count();
            // The prompt's last token is computed again, for the logits that follow it.
            let form = |len: usize| spec.long_from().is_some_and(|original| len > original);
            cached = if form(text.len()) == form(n) { same.min(n - 1) } else { 0 };
            // A state is the one after all tokens.
            if spec.recurrence.is_some() && cached < text.len() {
                cached = 0;
            }
            place = Some(held);
        }
        let TextPlace { mut pages, slot } = match place {
            Some(place) => place,
            None => TextPlace { pages: Vec::new(), slot: self.pages.free_slots.pop()? },
        };
        let (most, shared) = (CacheSize::pages_of(n + room), n / PAGE);
        while pages.len() > most {
            let page = pages.split_off(pages.len() - 1);
            self.pages.give_back(page);
        }
        let more = most - pages.len();
        let free = self.pages.free.len();
        if free < more {
            self.pages.vacate(TextPlace { pages, slot });
            return None;
        }
        let others = ((free - more) / (most - shared)).min(self.pages.free_slots.len());
        let samples = (prompt.samples - first).min(1 + others);
        pages.extend(self.pages.take(more));
        let texts =
            (first..first + samples).map(|sample| SampledText { prompt: index, sample, ..SampledText::default() });
        let slots = self.pages.free_slots.split_off(self.pages.free_slots.len() + 1 - samples);
        let spare = slots.into_iter().map(|slot| TextPlace { pages: self.pages.take(most - shared), slot });
        Some(Live {
            id: prompt.id,
            tokens: prompt.tokens.clone(),
            cached,
            place: TextPlace { pages, slot },
            texts: texts.collect(),
            spare: spare.collect(),
        })
    }

    /// One pass over all texts. Finished ones move to `done`.
    fn pass(
        &mut self,
        (dev, store): (&dyn Device, &mut dyn ParamStore),
        live: &mut Vec<Live>,
        asked: &mut SampleRequest,
        done: &mut Vec<SampledText>,
    ) -> Result<()> {
        // Texts that are being written first: the head multiplies their rows together.
        live.sort_by_key(|of| of.tokens.len() - of.cached > 1);
        let mut rows = PassRows::new(live, self.size.rows, self.decoder.spec().long_from());
        let spare = [0];
        let of_text = |&LiveRows { live: i, first, count, past }: &LiveRows| {
            let TextPlace { pages, slot } = &live[i].place;
            PagedRows { first, rows: count, past, pages, slot: *slot }
        };
        let mut paged: Vec<PagedRows> = rows.of_texts.iter().map(of_text).collect();
        if rows.tokens.is_empty() {
            // Another rank has work left, and needs this one's weights.
            rows.tokens.push(0);
            rows.positions.push(0);
            paged.push(PagedRows { first: 0, rows: 1, past: 0, pages: &spare, slot: 0 });
        }
        let n = rows.tokens.len();
        dev.upload(bytemuck::cast_slice(&rows.tokens), self.tokens.view_mut().slice(0..n))?;
        dev.upload(bytemuck::cast_slice(&rows.positions), self.positions.view_mut().slice(0..n))?;
        let [targets, none] = &self.nothing;
        let batch = Batch {
            tokens: self.tokens.view().slice(0..n),
            targets: targets.view(),
            positions: self.positions.view().slice(0..n),
            cu_seqlens: none.view(),
            documents: none.view(),
            rows: None,
            padding: 0,
            labeled: None,
        };
        let mut drawn = Vec::with_capacity(rows.wanted.len());
        let sampling = asked.sampling;
        let draw = |at: usize, logits: &[f32]| {
            let (i, text) = rows.drawn_for[at];
            let SampledText { sample, ids, .. } = &live[i].texts[text];
            pick(logits, sampling, sampling.uniform(live[i].id, *sample as u64, ids.len() as u64))
        };
        self.decoder.go_on(dev, store, &batch, &mut self.workspace, (&paged, &rows.wanted), &draw, &mut drawn)?;
        drop(paged);
        for of in &rows.of_texts {
            live[of.live].cached += of.count;
        }
        self.advance(dev, live, drawn, asked, done)
    }

    /// Gives texts whose tokens are all cached the next ones of `drawn`, and their samples places of their own.
    fn advance(
        &mut self,
        dev: &dyn Device,
        live: &mut Vec<Live>,
        drawn: Vec<(u32, f32)>,
        asked: &mut SampleRequest,
        done: &mut Vec<SampledText>,
    ) -> Result<()> {
        let Sampler { decoder, workspace, size, pages, kept, .. } = self;
        let original = decoder.spec().long_from();
        let mut drawn = drawn.into_iter();
        for of in std::mem::take(live) {
            if of.cached < of.tokens.len() {
                live.push(of);
                continue;
            }
            let (shared, partial) = (of.tokens.len() / PAGE, of.tokens.len() % PAGE);
            // The first text takes the pages over; the others share those that are full, and copy the next one.
            let others = of.spare.len() as u32;
            of.place.pages[..shared].iter().for_each(|&page| pages.held[page as usize] += others);
            let mut of_texts = Vec::with_capacity(of.texts.len());
            for TextPlace { pages: own, slot } in of.spare {
                if partial > 0 {
                    decoder.copy_page(dev, workspace, [of.place.pages[shared], own[0]], partial)?;
                }
                decoder.copy_slot(dev, workspace, [of.place.slot, slot])?;
                of_texts.push(TextPlace { pages: [&of.place.pages[..shared], &own].concat(), slot });
            }
            of_texts.insert(0, of.place);
            for ((mut text, place), (token, logprob)) in of.texts.into_iter().zip(of_texts).zip(&mut drawn) {
                text.ids.push(token);
                text.logprobs.push(logprob);
                let mut tokens = of.tokens.clone();
                tokens.push(token);
                text.ended = !(asked.next)(&Sampled { prompt: text.prompt, sample: text.sample, ids: &text.ids });
                if text.ended || text.ids.len() == asked.count || tokens.len() >= size.longest {
                    if asked.alone {
                        tokens.truncate(of.cached);
                        *kept = Some((tokens, place));
                    } else {
                        pages.vacate(place);
                    }
                    done.push(text);
                    continue;
                }
                // The text became a long one: all rotations changed.
                let cached = if original.is_some_and(|original| tokens.len() == original + 1) { 0 } else { of.cached };
                live.push(Live { id: of.id, tokens, cached, place, texts: vec![text], spare: Vec::new() });
            }
        }
        Ok(())
    }
}

/// The texts of all ranks.
fn share(dev: &dyn Device, mesh: &Mesh, texts: Vec<SampledText>) -> Result<Vec<SampledText>> {
    if mesh.group(Axis::World).size() == 1 {
        return Ok(texts);
    }
    let mut words = vec![texts.len() as u64];
    for SampledText { prompt, sample, ids, logprobs, ended } in &texts {
        words.extend([*prompt as u64, *sample as u64, u64::from(*ended), ids.len() as u64]);
        words.extend(ids.iter().zip(logprobs).map(|(&id, x)| (id as u64) << 32 | x.to_bits() as u64));
    }
    let mut exchange = Exchange::new(dev, mesh.group(Axis::World).clone(), "length of texts", 1)?;
    let most = exchange.gather(dev, &[words.len() as u64])?.into_iter().max().unwrap_or(0) as usize;
    words.resize(most, 0);
    let all = Exchange::new(dev, mesh.group(Axis::World).clone(), "texts", most)?.gather(dev, &words)?;
    let mut texts: Vec<SampledText> = Vec::new();
    for rank in all.chunks_exact(most) {
        let mut words = rank.iter().copied();
        let mut next = || words.next().unwrap_or(0);
        for _ in 0..next() {
            let (prompt, sample, ended, n) = (next() as usize, next() as usize, next() == 1, next());
            let (ids, logprobs) = (0..n).map(|_| next()).map(|x| ((x >> 32) as u32, f32::from_bits(x as u32))).unzip();
            texts.push(SampledText { prompt, sample, ids, logprobs, ended });
        }
    }
    // Ranks of tp and sp have written the same ones.
    texts.sort_by_key(|text| (text.prompt, text.sample));
    texts.dedup_by_key(|text| (text.prompt, text.sample));
    Ok(texts)
}
