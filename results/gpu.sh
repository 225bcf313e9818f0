# Everything here that wants a CUDA GPU, in one go, as JSON in a new folder:   sh results/gpu.sh FOLDER
out=$(realpath -m "${1:?usage: sh results/gpu.sh FOLDER}")
cd "$(dirname "$0")/.." && mkdir "$out" || exit 2
python3 -m pytest -q -k "convolution or operator"
python3 kernels.py --json "$out/kernels.json"
python3 results/step_time.py --json "$out/step_time.json"
python3 train.py --task depo --preset paper --canon abcd --compile --batch-size 16 --steps 60 --eval-every 60 --eval-size 16 --out "$out/train"
rm -f "$out/train/ckpt.pt" # a gigabyte
python3 results/peers.py --json "$out/peers.json"
python3 results/linear_speed.py --json "$out/linear_speed.json"
