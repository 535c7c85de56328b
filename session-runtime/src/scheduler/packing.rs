//! Packing: cells of sessions that asked for a codec, on their way off the device and back. Where something is lost, the newest tokens
//! stay as they are (KIVI's recent window).

use kernels::backend::{Backend, KvType, PageId, PoolSpec};
use kernels::codec::CellShape;
use kernels::codec::elements::convert;

use super::sequence::Sequence;
use super::tenants::Tenant;
use super::worker::Worker;
use crate::engine::Engine;
use crate::error::Error;
use crate::kv::chunk::Chunk;
use crate::kv::codec::KvCodec;
use crate::kv::contract::{Contract, Digest};
use crate::kv::reuse::KvReuse;

/// The codec of a session, and the contracts of its KV.
pub(super) struct Packing {
    pub codec: KvCodec,
    /// Of its cells: its tenant's for the codec, or one of its own where something is lost.
    pub cells: Digest,
    /// Of its pages: its tenant's, or one of its own where they may be what a codec left.
    pub pages: Digest,
}

impl<B: Backend> Worker<B> {
    /// What becomes of a session's KV with the codec that it asked for. Only KV of f16 is packed with a loss.
    pub(super) fn packing(&self, session: &str, tenant: &Tenant, asked: KvCodec, reuse: KvReuse) -> Packing {
        let unfit = asked.lossy().is_some() && self.engine.pool_spec().kv_type != KvType::F16;
        let codec = if unfit { KvCodec::Raw } else { asked };
        let raw = self.tenant_contract(tenant);
        let of_tenant = || self.contract.of_tenant(tenant.name());
        match codec {
            _ if reuse == KvReuse::Approximate => {
                let own = approximate(&self.contract, tenant, codec, session);
                Packing { codec, cells: own, pages: own }
            }
            KvCodec::Raw => Packing { codec, cells: raw, pages: raw },
            KvCodec::Lossless => Packing { codec, cells: of_tenant().lossless().digest(), pages: raw },
            KvCodec::Int8 | KvCodec::Int4 => {
                let own = of_tenant().packed(codec.name(), session).digest();
                Packing { codec, cells: own, pages: own }
            }
        }
    }

    /// The contract of a tenant's KV of which nothing was lost, as it is on the device.
    pub(super) fn tenant_contract(&self, tenant: &Tenant) -> Digest {
        match tenant.name() {
            None => self.contract_digest,
            name => self.contract.of_tenant(name).digest(),
        }
    }

    /// Whether cells with a codec that were saved under another contract, near to this one, can be taken. Packed ones are of the
    /// type of elements that they were packed from.
    pub(super) fn converts(&self, codec: KvCodec, saved: &Contract) -> bool {
        codec == KvCodec::Raw || saved.kv_layout == self.contract.kv_layout
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

    /// A cell as the tiers keep it with the codec of its chunk, copied from its pages.
    pub(super) fn take_cell(
        &self,
        codec: KvCodec,
        chunk: &Chunk,
        layer: usize,
        pages: &[&[PageId]],
    ) -> Result<Vec<u8>, Error> {
        match (codec, codec.lossy()) {
            (_, Some(codec)) => self.engine.gather_packed(pages, codec, &self.cell_shape(layer, chunk)),
            (KvCodec::Lossless, _) => {
                let cell = self.engine.gather_lossless(pages, chunk.tokens)?;
                self.trace.packed(cell.len());
                Ok(cell)
            }
            _ => self.engine.gather_cell(pages, chunk.tokens),
        }
    }

    /// Bytes of a chunk's cell, as the tiers keep it. Without loss they differ from cell to cell: then it is what they have
    /// been on average.
    pub(super) fn saved_cell_bytes(&self, sequence: &Sequence, chunk: &Chunk) -> usize {
        let codec = sequence.codec.of_chunk(chunk);
        match (codec, codec.lossy()) {
            (_, Some(codec)) => self.cell_shape(0, chunk).packed_bytes(codec),
            (KvCodec::Lossless, _) => self.costs.packed_bytes(self.engine.cell_bytes(chunk.tokens)),
            _ => {
                let kv_type = sequence.origin.map(|origin| origin.elements);
                let pool = self.engine.pool_spec();
                let spec = PoolSpec { kv_type: kv_type.unwrap_or(pool.kv_type), ..pool };
                spec.cell_bytes(self.engine.config().kv_heads, chunk.tokens)
            }
        }
    }
}

/// Digest of the contract of cells of a session that takes KV near what would be computed.
pub(super) fn approximate(contract: &Contract, tenant: &Tenant, codec: KvCodec, session: &str) -> Digest {
    contract.of_tenant(tenant.name()).approximate(codec.name(), session).digest()
}

/// Copies a cell, as the tiers keep it with the codec of its chunk, to its pages. A raw one may have elements of another type.
pub(super) fn put_cell<B: Backend>(
    engine: &mut Engine<B>,
    (codec, elements): (KvCodec, KvType),
    shape: &CellShape,
    pages: &[&[PageId]],
    cell: &[u8],
) -> Result<(), Error> {
    match (codec, codec.lossy()) {
        (_, Some(codec)) => engine.scatter_packed(pages, codec, shape, cell),
        (KvCodec::Lossless, _) => engine.scatter_lossless(pages, shape.tokens, cell),
        _ if elements != engine.pool_spec().kv_type => {
            let cell = convert(elements, engine.pool_spec().kv_type, shape, cell)?;
            engine.scatter_cell(pages, shape.tokens, &cell)
        }
        _ => engine.scatter_cell(pages, shape.tokens, cell),
    }
}
