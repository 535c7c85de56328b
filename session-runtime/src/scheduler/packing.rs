//! Packing: cells of sessions that asked for a codec, on their way off the device and back. The unsealed tail stays as it is, so
//! that the newest tokens have lost nothing.

use kernels::backend::{Backend, KvType, PageId};
use kernels::codec::CellShape;

use super::sequence::Sequence;
use super::tenants::Tenant;
use super::worker::Worker;
use crate::engine::Engine;
use crate::error::Error;
use crate::kv::chunk::Chunk;
use crate::kv::codec::KvCodec;
use crate::kv::contract::Digest;

impl<B: Backend> Worker<B> {
    /// The codec that a session gets of the one it asked for, and the contract of its cells: its tenant's, or one of its own where
    /// something is lost. Only KV of f16 is packed.
    pub(super) fn cell_contract(&self, session: &str, tenant: &Tenant, asked: KvCodec) -> (KvCodec, Digest) {
        let codec = if self.engine.pool_spec().kv_type == KvType::F16 { asked } else { KvCodec::Raw };
        match codec.codec() {
            None if tenant.name().is_none() => (KvCodec::Raw, self.contract_digest),
            None => (KvCodec::Raw, self.contract.of_tenant(tenant.name()).digest()),
            Some(packing) => {
                let contract = self.contract.of_tenant(tenant.name());
                (codec, contract.packed(packing.name(), session).digest())
            }
        }
    }

    pub(super) fn cell_shape(&self, layer: usize, chunk: &Chunk) -> CellShape {
        let config = self.engine.config();
        let windowed = config.layer_kinds.get(layer).is_some_and(|kind| kind.window().is_some());
        let window_base = if windowed { config.window_rope_base } else { None };
        CellShape {
            kv_heads: config.kv_heads,
            tokens: chunk.tokens,
            head_dim: config.head_dim,
            start: chunk.start,
            rope_base: window_base.unwrap_or(config.rope_base),
            rope_pairing: config.rope_pairing,
        }
    }

    /// A cell as the tiers keep it, copied from its pages.
    pub(super) fn take_cell(
        &self,
        codec: KvCodec,
        chunk: &Chunk,
        layer: usize,
        pages: &[&[PageId]],
    ) -> Result<Vec<u8>, Error> {
        match codec.codec() {
            Some(codec) if chunk.is_sealed() => {
                self.engine.gather_packed(pages, codec, &self.cell_shape(layer, chunk))
            }
            _ => self.engine.gather_cell(pages, chunk.tokens),
        }
    }

    /// Bytes of a chunk's cell, as the tiers keep it.
    pub(super) fn saved_cell_bytes(&self, sequence: &Sequence, chunk: &Chunk) -> usize {
        match sequence.codec.codec() {
            Some(codec) if chunk.is_sealed() => self.cell_shape(0, chunk).packed_bytes(codec),
            _ => self.engine.cell_bytes(chunk.tokens),
        }
    }
}

/// Copies a cell, as the tiers keep it, to its pages.
pub(super) fn put_cell<B: Backend>(
    engine: &mut Engine<B>,
    codec: KvCodec,
    shape: &CellShape,
    pages: &[&[PageId]],
    cell: &[u8],
) -> Result<(), Error> {
    match codec.codec() {
        Some(codec) => engine.scatter_packed(pages, codec, shape, cell),
        None => engine.scatter_cell(pages, shape.tokens, cell),
    }
}
