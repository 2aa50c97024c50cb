#!/bin/sh
# sh recipes/radar_vae/launch.sh vae|ldm [more flags]: the documented recommendation for each stage.
#   sh recipes/radar_vae/launch.sh vae --dataset_dir DIR
#   sh recipes/radar_vae/launch.sh ldm --dataset_dir DIR --vae_ckpt runs/radar_vae/vae/last.pt
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:128
program="$(dirname "$0")/train_latent_diffusion.py"
stage="$1"
[ $# -gt 0 ] && shift
case "$stage" in
    vae) exec "${PYTHON:-python}" "$program" --mode train_vae --vae_type ultra_lightweight --batch_size 1 \
            --gradient_accumulation_steps 8 --use_amp --use_checkpoint --num_workers 1 "$@" ;;
    ldm) exec "${PYTHON:-python}" "$program" --mode train_ldm --batch_size 8 --num_workers 1 "$@" ;;
    *) echo "launch.sh needs the stage, vae or ldm: sh recipes/radar_vae/launch.sh vae --dataset_dir DIR" >&2; exit 2 ;;
esac
