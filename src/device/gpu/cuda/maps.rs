//! Encodes tensor maps for a launch, through the driver. Never launches.
use crate::gpu::driver::{Arg, Map, Swizzle};
use cudarc::driver::sys;
use flatshard_base::{DType, Error, Result};

/// Maximum tensor maps per launch.
const MAPS: usize = 6;

/// The maps among a launch's arguments, in order. Encoding takes the host less than a microsecond each.
pub(super) fn encode(op: &'static str, args: &[Arg]) -> Result<[sys::CUtensorMap; MAPS]> {
    let mut maps = [sys::CUtensorMap { opaque: [0; 16] }; MAPS];
    let mut places = maps.iter_mut();
    for arg in args {
        if let Arg::Map(map) = arg {
            let place = places.next().ok_or_else(|| Error::op(op, format!("more than {MAPS} tensor maps")))?;
            one(op, map, place)?;
        }
    }
    Ok(maps)
}

fn one(op: &'static str, map: &Map, place: &mut sys::CUtensorMap) -> Result<()> {
    use sys::{CUtensorMapDataType as Type, CUtensorMapSwizzle as Pattern};
    let dtype = match map.of.dtype() {
        DType::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::F16 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        DType::U32 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT32,
        other => return Err(Error::op(op, format!("cannot make a tensor map of {other}"))),
    };
    let swizzle = match map.swizzle {
        Swizzle::None => Pattern::CU_TENSOR_MAP_SWIZZLE_NONE,
        Swizzle::B32 => Pattern::CU_TENSOR_MAP_SWIZZLE_32B,
        Swizzle::B64 => Pattern::CU_TENSOR_MAP_SWIZZLE_64B,
        Swizzle::B128 => Pattern::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let strides = map.strides.map(|elements| elements * map.of.dtype().size() as u64);
    // SAFETY: three entries each, for three dimensions (strides: two); the driver reads them and writes the map. The
    // address is only encoded, and the following launch holds the operand.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            place,
            dtype,
            3,
            map.of.as_ptr().cast_mut().cast(),
            map.sizes.as_ptr(),
            strides.as_ptr(),
            map.tile.as_ptr(),
            [1u32; 3].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    let what = |e: cudarc::driver::DriverError| {
        let Map { sizes, tile, .. } = map;
        Error::op(
            op,
            format!("cannot make a tensor map of {sizes:?} in boxes of {tile:?}, strides {strides:?} bytes: {e:?}"),
        )
    };
    code.result().map_err(what)
}
