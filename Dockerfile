# docker build -t flatshard . && docker run --rm flatshard --max-steps 100
#
# For GPUs, a base with cuBLASLt and NCCL; the driver comes from the host:
# docker build -t flatshard --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 . && docker run --rm --gpus all flatshard
ARG BASE=debian:bookworm-slim

FROM rust:1.95-slim-bookworm AS build
WORKDIR /flatshard
COPY . .
RUN cargo build --release --locked --features png && mkdir /out && cp LICENSE /out \
    && for binary in flatshard run_fsdp run_ddp experiments gpu_check; do strip -o "/out/$binary" "target/release/$binary"; done

FROM ${BASE}
COPY --from=build /out/flatshard /out/run_fsdp /out/run_ddp /out/experiments /out/gpu_check /usr/local/bin/
COPY --from=build /out/LICENSE /usr/share/doc/flatshard/
# Not root: what a run writes belongs to whoever `docker run --user` names.
RUN install -d -m 1777 /runs
WORKDIR /runs
USER 1000:1000
ENV HOME=/tmp
ENTRYPOINT ["run_fsdp"]
