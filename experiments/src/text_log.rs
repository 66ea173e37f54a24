//! Parses losses from the logs of flatshard, OpenRLHF, torchtitan, Megatron-LM and the Hugging Face Trainer. Only steps
//! and losses: a metrics file has more, and more digits. Never judges them.
use std::collections::BTreeMap;

/// The words before a loss, and before a step number.
const LOSS: [&str; 6] = ["loss", "gpt_loss", "lm_loss", "train/loss", "train/gpt_loss", "global_avg_loss"];
const STEP: [&str; 4] = ["step", "global_step", "iteration", "train/global_step"];

/// The loss of each step, numbered from 1 if lines have no number; NaN as written. A progress bar that restarts is the
/// next epoch.
pub fn losses(text: &str) -> BTreeMap<u64, f64> {
    let mut losses = BTreeMap::new();
    let (mut last, mut bar, mut before) = (0, 0, 0); // `before`: steps of the epochs before this bar's
    for line in text.split(['\n', '\r']) {
        let line = plain(line);
        let words: Vec<&str> = line.split(|c: char| c.is_whitespace() || ",:=|'\"{}[]()".contains(c)).collect();
        let words: Vec<&str> = words.into_iter().filter(|word| !word.is_empty()).collect();
        if words.iter().any(|word| word.to_lowercase().starts_with("eval")) {
            continue;
        }
        let after = |keys: &[&str]| words.windows(2).find(|pair| keys.contains(&pair[0])).map(|pair| pair[1]);
        let Some(loss) = after(&LOSS).and_then(|word| word.parse::<f64>().ok()) else { continue };
        let numbered = after(&STEP).and_then(|word| word.split('/').next()?.parse::<u64>().ok());
        let of = |word: &&str| {
            let (n, total) = word.split_once('/')?;
            total.parse::<u64>().ok().and(n.parse::<u64>().ok())
        };
        let step = match (numbered, words.iter().find_map(of)) {
            (Some(step), _) => step,
            (None, Some(n)) => {
                before += if n < bar { bar } else { 0 };
                bar = n;
                before + n
            }
            (None, None) => last + 1,
        };
        last = step;
        losses.insert(step, loss);
    }
    losses
}

/// Strips terminal colors.
fn plain(line: &str) -> String {
    let mut parts = line.split("\x1b[");
    let first = parts.next().unwrap_or_default().to_string();
    parts.fold(first, |text, part| {
        text + part.split_once(|c: char| c.is_ascii_alphabetic()).map_or("", |(_, rest)| rest)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Vec<(u64, f64)> {
        losses(text).into_iter().collect()
    }

    #[test]
    fn logs_of_each_tool() {
        let ours = "data     synthetic Markov chain (minimum loss 1.2130): 2048 tokens\n\
                    step 1/2  loss 4.174  grad_norm 0.80  lr 2.0e-3  15,578 tok/s  mem 0.17 GiB  eta 1s  61% of peak\n\
                    step 2/2  loss NaN  grad_norm NaN  lr 2.0e-3  15,578 tok/s  mem 0.17 GiB  eta 0s\n\
                    eval  step 2  loss 3.0000  perplexity 20.09  tokens 64\n";
        let (first, second) = (of(ours)[0], of(ours)[1]);
        assert!(of(ours).len() == 2 && first == (1, 4.174) && second.0 == 2 && second.1.is_nan());
        assert_eq!(of("step: 1 loss: 4.1743 grad_norm: 0.7952\n"), [(1, 4.1743)]); // of version 0.1.0
        assert_eq!(of("\x1b[31mstep:  7  \x1b[32mloss:  8.0403  \x1b[0mtps: 27,483\n"), [(7, 8.0403)]);
        // A bar is redrawn repeatedly, and restarts in the next epoch.
        let bars = "Train step of epoch 0:  50%|##  | 1/2 [00:01<00:01, gpt_loss=3, lr=1e-3]\r\
                    Train step of epoch 0: 100%|####| 2/2 [00:02<00:00, gpt_loss=2.5, lr=1e-3]\r\
                    Train step of epoch 0: 100%|####| 2/2 [00:02<00:00, gpt_loss=2, lr=1e-3]\n\
                    Eval stage of steps 2: 100%|####| 1/1 [00:00<00:00, eval gpt_loss=9]\n\
                    Train step of epoch 1:  50%|##  | 1/2 [00:01<00:01, gpt_loss=1.5, lr=1e-3]\r";
        assert_eq!(of(bars), [(1, 3.0), (2, 2.0), (3, 1.5)]);
        let trainer = "{'loss': 4.5, 'grad_norm': 1.0, 'epoch': 0.1}\n{'eval_loss': 4.4}\n{'loss': '4.25', 'epoch': 0.2}\n\
                       {'train_runtime': 2.0, 'train_loss': 4.3}\n";
        assert_eq!(of(trainer), [(1, 4.5), (2, 4.25)]);
        assert_eq!(of(" iteration        3/     10 | lm loss: 1.2E+00 | loss scale: 1.0 |\n"), [(3, 1.2)]);
        assert!(of("no step\nloss of contact\n").is_empty());
    }
}
