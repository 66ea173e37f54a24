//! Prints a plan as a table and as JSON. Never computes more than sums and ratios of what it shows.
use super::cost::{Cluster, Cost, PlanRow, RESERVED};
use flatshard::base::CATEGORIES;
use flatshard::base::Category;
use serde_json::{Value, json};

fn gib(bytes: usize) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
/// Enough digits to compare.
fn short(x: f64) -> String {
    match x {
        x if x >= 1000.0 => format!("{x:.0}"),
        x if x >= 10.0 => format!("{x:.1}"),
        x if x >= 0.1 => format!("{x:.2}"),
        _ => format!("{x:.4}"),
    }
}

const HEAD: [&str; 13] = [
    "strategy",
    "params",
    "grads",
    "optim",
    "slots",
    "activ.",
    "other",
    "total",
    "fits",
    "comm",
    "step ms",
    "exposed",
    "tok/s/GPU",
];

/// Activations are what is saved for backward, and what a block uses temporarily.
fn columns(cost: &Cost) -> [usize; 6] {
    let of = |wanted: &[Category]| cost.bytes.iter().filter(|b| wanted.contains(&b.0)).map(|b| b.1).sum();
    [
        of(&[Category::Params]),
        of(&[Category::Grads]),
        of(&[Category::Optimizer]),
        of(&[Category::Slots]),
        of(&[Category::Saved, Category::Scratch]),
        of(&[Category::Other]),
    ]
}

pub fn text(cluster: &Cluster, rows: &[PlanRow], best: Option<&PlanRow>, command: Option<&str>) -> String {
    let mut out = String::new();
    let costs = || rows.iter().filter_map(|row| row.outcome.as_ref().ok());
    if let Some(cost) = costs().next() {
        let spec = &cost.engine.spec;
        out += &format!(
            "model    {} of {} parameters: {} layers, width {}, {} heads ({} for keys), ff {}, vocabulary {}; {}\n",
            spec.arch.name(),
            cost.params,
            spec.layers,
            spec.dim,
            spec.heads,
            spec.kv_heads,
            spec.ff,
            spec.vocab,
            cost.engine.strategy.dtype(),
        );
        out.extend(cost.carried.map(|carried| format!("vision   {carried}\n")));
    }
    let memory =
        cluster.machine.memory().map_or("unknown memory".into(), |bytes| format!("{:.1} GiB each", gib(bytes)));
    out += &format!(
        "machine  {} x {} ({} per node), {memory}\n",
        cluster.gpus,
        cluster.machine.name(),
        cluster.per_node.min(cluster.gpus)
    );
    if let Some(cost) = best.and_then(|row| row.outcome.as_ref().ok()).or(costs().next()) {
        let [sequences, tokens] = [cost.work.batch_size, cost.work.max_len];
        let (micro, ranks) = (cost.work.grad_accum, cost.mesh.dp_replicate * cost.mesh.dp_shard);
        out += &format!(
            "batch    {sequences} x {tokens} tokens x {micro} micro-batches x {ranks} data-parallel ranks = {} tokens per step\n",
            cost.work.tokens() * ranks,
        );
    }
    out += "         GiB per rank; comm: GiB received per rank and step; times are predictions\n\n";

    let measured = costs().any(|cost| cost.measured.is_some());
    let mfu = costs().any(|cost| cost.mfu.is_some());
    let hosts = costs().any(|cost| cost.host() > 0);
    let mut head: Vec<String> = HEAD.map(str::to_string).to_vec();
    head.extend(mfu.then(|| "MFU %".to_string()));
    head.extend(hosts.then(|| "host".to_string()));
    head.extend(measured.then_some(["measured", "error %"]).into_iter().flatten().map(str::to_string));
    let mut table = vec![head];
    for row in rows {
        let Ok(cost) = &row.outcome else { continue };
        let mut line = vec![row.candidate.name.clone()];
        line.extend(columns(cost).map(|bytes| short(gib(bytes))));
        line.push(short(gib(cost.total())));
        line.push(if cost.fits { "yes" } else { "no" }.into());
        line.extend(match &cost.step {
            Some(step) => [
                short(gib(step.received_bytes() as usize)),
                short(1e3 * step.seconds()),
                short(1e3 * step.totals.exposed),
                short(cost.tokens_per_sec / cluster.gpus as f64),
            ],
            None => ["-"; 4].map(str::to_string),
        });
        line.extend(mfu.then(|| cost.mfu.map_or("-".into(), |mfu| format!("{:.1}", 100.0 * mfu))));
        line.extend(hosts.then(|| short(gib(cost.host()))));
        if let Some([seconds, _]) = cost.measured {
            line.push(short(1e3 * seconds));
            let error = cost.step.as_ref().map_or(0.0, |step| step.seconds() / seconds - 1.0);
            line.push(format!("{:+.1}", 100.0 * error));
        }
        table.push(line);
    }
    out += &aligned(&table);
    let refused = rows.iter().filter_map(|row| Some((row.candidate.name.as_str(), row.outcome.as_ref().err()?)));
    let mut refused: Vec<_> = refused.collect();
    refused.sort_by_key(|r| r.1.clone());
    for same in refused.chunk_by(|a, b| a.1 == b.1) {
        let names: Vec<_> = same.iter().map(|r| r.0).collect();
        out += &format!("\nnot planned: {}\n    {}\n", names.join(", "), same[0].1);
    }
    out += &match (best, command) {
        (Some(row), Some(command)) => {
            let host = row.outcome.as_ref().map_or(0, Cost::host);
            let ranks = cluster.per_node.min(cluster.gpus);
            let needs = match host {
                0 => String::new(),
                host => format!(
                    "    needs {:.1} GiB of host memory per rank, {:.1} GiB per node\n",
                    gib(host),
                    gib(host * ranks)
                ),
            };
            format!("\nrecommended: {}\n    {command}\n{needs}", row.candidate.name)
        }
        _ => match costs().min_by_key(|cost| cost.total()) {
            Some(least) => format!(
                "\nnothing fits: the smallest needs {:.2} GiB per rank, and {:.1} GiB are reserved for the driver and \
                 NCCL. Use more GPUs, raise --memory-budget if it is given, reduce --batch-size or --max-len, or use \
                 --grad-accum instead of --batch-size\n",
                gib(least.total()),
                gib(RESERVED),
            ),
            None => String::new(),
        },
    };
    out
}

/// Names left-aligned, numbers right-aligned.
fn aligned(table: &[Vec<String>]) -> String {
    let columns = table.iter().map(Vec::len).max().unwrap_or(0);
    let width = |i: usize| table.iter().filter_map(|line| line.get(i)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|i| width(i).unwrap_or(0)).collect();
    let cell = |(i, cell): (usize, &String)| match i {
        0 => format!("{cell:<w$}", w = widths[0]),
        _ => format!("{cell:>w$}", w = widths[i]),
    };
    let line = |line: &Vec<String>| line.iter().enumerate().map(cell).collect::<Vec<_>>().join("  ") + "\n";
    table.iter().map(line).collect()
}

fn cost_json(cost: &Cost) -> Value {
    let named = |(category, bytes): &(Category, usize)| {
        let name = CATEGORIES.iter().find(|c| c.0 == *category).map_or("", |c| c.1);
        (name.to_string(), json!(bytes))
    };
    let bytes: serde_json::Map<String, Value> = cost.bytes.iter().map(named).collect();
    let mesh = &cost.mesh;
    let mut value = json!({
        "mesh": {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard, "sp": mesh.sp, "tp": mesh.tp},
        "bytes": bytes,
        "total_bytes": cost.total(),
        "host_bytes": cost.host(),
        "fits": cost.fits,
        "tokens_per_step": cost.work.tokens() * mesh.dp_replicate * mesh.dp_shard,
    });
    if mesh.ep > 1 {
        value["mesh"]["ep"] = json!(mesh.ep);
    }
    let Some(step) = &cost.step else { return value };
    let received = step.received.iter();
    let received: Vec<Value> =
        received.map(|(axis, bytes, ops)| json!({"axis": axis.name(), "bytes": bytes, "collectives": ops})).collect();
    let t = &step.totals;
    let times = json!({
        "step_s": t.seconds,
        "compute_s": t.compute,
        "memory_bound_s": t.memory,
        "comm_s": t.communication,
        "exposed_comm_s": t.exposed,
        "comm_bytes": step.received_bytes(),
        "comm": received,
        "launches": t.launches,
        "tokens_per_sec": cost.tokens_per_sec,
        "mfu_llm_foundry": cost.mfu,
        "measured_step_s": cost.measured.map(|m| m[0]),
        "measured_wall_s": cost.measured.map(|m| m[1]),
        "error": cost.measured.map(|m| t.seconds / m[0] - 1.0),
    });
    if let (Some(value), Value::Object(times)) = (value.as_object_mut(), times) {
        value.extend(times);
    }
    value
}

pub fn json(cluster: &Cluster, rows: &[PlanRow], best: Option<&PlanRow>, command: Option<&str>) -> String {
    let row = |row: &PlanRow| {
        let mut value = match &row.outcome {
            Ok(cost) => cost_json(cost),
            Err(why) => json!({"refused": why}),
        };
        value["strategy"] = json!(row.candidate.name);
        value["flags"] = json!(row.candidate.flags);
        value
    };
    let params = rows.iter().find_map(|row| Some(row.outcome.as_ref().ok()?.params));
    let plan = json!({
        "gpus": cluster.gpus,
        "gpus_per_node": cluster.per_node,
        "machine": cluster.machine.name(),
        "memory_bytes": cluster.machine.memory(),
        "params": params,
        "strategies": rows.iter().map(row).collect::<Vec<_>>(),
        "recommended": best.map(|row| row.candidate.name.as_str()),
        "command": command,
    });
    format!("{plan:#}")
}
