//! Bytes that a rank will hold, by category: the engine's formula, and what the ranks' places change of it. Never allocates.
use crate::base::{Category, Result};
use crate::ckpt::Checkpointer;
use crate::comm::Axis;
use crate::comm::mesh::MeshSizes;
use crate::engine::{Engine, EngineOptions, GeneratorOptions};
use crate::run::settings::DeviceName;

/// Bytes of a rank, in the order of [`crate::base::CATEGORIES`]: the engine's, and what it takes to save; `behind`
/// training, that is a copy of what the rank saves.
pub fn planned(
    engine: &EngineOptions,
    mesh: &MeshSizes,
    behind: bool,
    device: DeviceName,
    per_host: usize,
) -> Result<Vec<(Category, usize)>> {
    let mut planned = Engine::planned(engine, mesh)?;
    let part = engine.decoder(mesh, &mesh.coords(0))?;
    let (layouts, moments) = (part.layouts(), engine.rule.state());
    let (category, mut bytes) = Checkpointer::planned(layouts, moments);
    if behind {
        bytes += Checkpointer::planned_copy(layouts, moments, mesh.world() / mesh.tp);
    }
    planned.iter_mut().filter(|p| p.0 == category).for_each(|p| p.1 += bytes);
    if device == DeviceName::Cuda {
        let sums = engine.summed(mesh)?;
        planned.iter_mut().filter(|p| p.0 == Category::Scratch).for_each(|p| p.1 += sums);
    }
    let apart = [engine.strategy.gathered_apart(layouts, mesh), engine.gathered_apart(mesh)?];
    add_apart(&mut planned, mesh, device, per_host, apart);
    Ok(planned)
}

/// The same of a rank that only writes.
pub fn planned_writing(
    options: &GeneratorOptions,
    mesh: &MeshSizes,
    device: DeviceName,
    per_host: usize,
) -> Result<Vec<(Category, usize)>> {
    let mut planned = options.planned(mesh)?;
    let layouts = GeneratorOptions::frozen(&options.decoder(mesh, &mesh.coords(0))?);
    let apart = [options.strategy.gathered_apart(&layouts, mesh), options.gathered_apart(mesh)?];
    add_apart(&mut planned, mesh, device, per_host, apart);
    Ok(planned)
}

/// One gathered buffer a group is planned. There is one a GPU, or one a host: what there is more, of slots and of scratch.
fn add_apart(
    planned: &mut [(Category, usize)],
    mesh: &MeshSizes,
    device: DeviceName,
    per_host: usize,
    [slots, scratch]: [usize; 2],
) {
    let per_holder = if device == DeviceName::Cuda { 1 } else { per_host };
    let across = if holders(mesh, Axis::Sp, per_holder).0 > 1 { Axis::Sp } else { Axis::Tp };
    for (category, apart, axis) in [(Category::Slots, slots, Axis::Fsdp), (Category::Scratch, scratch, across)] {
        let (holders, ranks) = holders(mesh, axis, per_holder);
        // `apart` is all of it but a share: what there is more where each rank has its own.
        let more = (apart * (holders - 1)).div_ceil((ranks - 1).max(1));
        planned.iter_mut().filter(|p| p.0 == category).for_each(|p| p.1 += more);
    }
}

/// Of the first group along an axis: how many parts it lies in, each of `per_holder` neighbouring ranks, and its size.
fn holders(mesh: &MeshSizes, axis: Axis, per_holder: usize) -> (usize, usize) {
    let ranks = mesh.group(axis, 0);
    (ranks.chunk_by(|a, b| a / per_holder == b / per_holder).count(), ranks.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_lies_in_as_many_parts_as_hosts_hold_it() {
        let mesh = MeshSizes { dp_replicate: 2, dp_shard: 4, sp: 1, tp: 2 };
        assert_eq!(holders(&mesh, Axis::Fsdp, 16), (1, 4)); // ranks 0, 2, 4, 6 of 16 on a host
        assert_eq!(holders(&mesh, Axis::Fsdp, 4), (2, 4));
        assert_eq!(holders(&mesh, Axis::Fsdp, 1), (4, 4));
        assert_eq!(holders(&mesh, Axis::Tp, 4), (1, 2));
    }
}
