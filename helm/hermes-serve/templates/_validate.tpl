{{/* Checks that the schema cannot express: a combination of values that cannot work ends the rendering with one sentence. */}}

{{- define "hermes.validate" -}}
{{- include "hermes.validateTexts" . -}}
{{- include "hermes.validateRunning" . -}}
{{- include "hermes.validateOwned" . -}}
{{- include "hermes.validateNames" . -}}
{{- include "hermes.validatePods" . -}}
{{- include "hermes.validateSecrets" . -}}
{{- include "hermes.validateSizes" . -}}
{{- include "hermes.validateStorage" . -}}
{{- include "hermes.validateModel" . -}}
{{- include "hermes.validateDoors" . -}}
{{- include "hermes.validateNetwork" . -}}
{{- end }}

{{/* toYaml returns nothing for a text that YAML cannot carry, and the whole of the settings would silently be gone. */}}
{{- define "hermes.validateTexts" -}}
{{- range $name, $value := .Values }}
{{- $said := dict "values" $value }}
{{- if ne (toJson (fromYaml (toYaml $said))) (toJson $said) }}
{{- fail (printf "%s has a text with a character that YAML cannot carry (a control character such as U+007F or U+0085, or U+FFFE): remove it" $name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What cannot work on top of the RayService that is there. Helm can look only where it talks to a cluster, so `helm template`
     finds nothing. */}}
{{- define "hermes.validateRunning" -}}
{{- if .Capabilities.APIVersions.Has "ray.io/v1/RayService" }}
{{- $name := include "hermes.fullname" . }}
{{- with lookup "ray.io/v1" "RayService" .Release.Namespace $name }}
{{- if .metadata.deletionTimestamp }} {{- /* Helm would patch it, and report success */}}
{{- fail (printf "the RayService %q is still being deleted, and what is installed now would go with it: wait for `kubectl wait --for=delete rayservice/%s -n %s --timeout=10m`, then repeat this command" $name $name $.Release.Namespace) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hermes.validateNames" -}}
{{- $name := include "hermes.fullname" . -}}
{{- $longest := .Values.redis.internal.enabled | ternary 46 47 -}} {{- /* Kubernetes appends to the name of a StatefulSet */}}
{{- if gt (len $name) $longest }}
{{- fail (printf "the name %q (of the release, or fullnameOverride) has %d characters, but KubeRay and the StatefulSet of an internal Redis allow at most %d: choose a shorter one" $name (len $name) $longest) }}
{{- end }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "the name %q (of the release, or fullnameOverride) must begin with a letter and contain only a-z, 0-9 and '-': it becomes the name of a RayService" $name) }}
{{- end }}
{{- if not .Values.image.repository }}
{{- fail "image.repository is empty: build cluster/docker/gpu.Dockerfile or cpu.Dockerfile, push the image, and set its name here" }}
{{- end }}
{{- range $path, $image := dict "image" .Values.image "redis.internal.image" .Values.redis.internal.image "redis.internal.exporter.image" .Values.redis.internal.exporter.image }}
{{- if not (regexMatch "^(([A-Za-z0-9][-.A-Za-z0-9]*|\\[[0-9a-fA-F:]+\\])(:[0-9]{1,5})?/)?[a-z0-9]+([-._/]+[a-z0-9]+)*$" $image.repository) }}
{{- fail (printf "%s.repository is %q, but takes a name such as registry.example:5000/team/image: without a scheme, with small letters after the registry, and the tag or digest in %s.tag or %s.digest" $path $image.repository $path $path) }}
{{- end }}
{{- if eq $image.tag "latest" }}
{{- fail (printf "%s.tag is 'latest', which changes over time: set a version or a digest" $path) }}
{{- end }}
{{- end }}
{{- end }}

{{/* What the chart and KubeRay write into the same place, and what Services and policies select by. */}}
{{- define "hermes.validatePods" -}}
{{- $rules := .Files.Get "files/settings.json" | fromJson -}}
{{- $selector := keys (include "hermes.component" (list . "any") | fromYaml) -}}
{{- $ray := dict "" .Values "head." .Values.head "ingressPods." .Values.ingressPods "engines." .Values.engines -}}
{{- $others := dict "redis.internal." .Values.redis.internal "uninstall." .Values.uninstall "tests." .Values.tests -}}
{{- range $path, $of := merge (dict) $ray $others }}
{{- range $key := list "podLabels" "commonLabels" }}
{{- range $name, $_ := get $of $key | default dict }}
{{- if or (has $name $selector) (hasPrefix "ray.io/" $name) }}
{{- fail (printf "%s%s has %s, by which Services, network policies and KubeRay find the pods: remove it" $path $key $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $key := list "podAnnotations" "commonAnnotations" }}
{{- range $name, $_ := get $of $key | default dict }}
{{- if regexMatch "^(helm\\.sh|hermes-serve|ray\\.io)/" $name }}
{{- fail (printf "%s%s has %s, which Helm, the chart or KubeRay sets: remove it" $path $key $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- range $path, $of := $ray }}
{{- $names := dict }}
{{- range $name, $_ := $of.env }}{{ $_ := set $names (printf "env.%s" $name) $name }}{{ end }}
{{- range $of.extraEnv }}{{ $_ := set $names (printf "%sextraEnv: %s" $path .name) .name }}{{ end }}
{{- range $where, $name := $names }}
{{- with get $rules.variables $name }}
{{- fail (printf "%s %s" $where .) }}
{{- end }}
{{- if or (hasPrefix "HERMES_" $name) (regexMatch "^(RAY_(ADDRESS|IP|PORT|CLUSTER_|CLOUD_|NODE_|AUTH_|REDIS_|external_|enable_autoscaler)|FQ_RAY_IP|KUBERAY_|REDIS_|HF_TOKEN$|HUGGING_FACE_HUB_TOKEN$)" $name) }}
{{- fail (printf "%s is set by the chart or by KubeRay (from a Secret if it is secret): remove it" $where) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Values that the chart, KubeRay or another setting already determines. */}}
{{- define "hermes.validateOwned" -}}
{{- if hasPrefix "RAY" .Values.settings.namespace }}
{{- fail (printf "settings.namespace is %q, but keys in Redis that begin with RAY belong to Ray: choose another" .Values.settings.namespace) }}
{{- end }}
{{- $rules := .Files.Get "files/settings.json" | fromJson -}} {{- /* written by helm/schema.py from the service's settings */}}
{{- range $form := $rules.forms }}
{{- $value := merge (dict "model" (include "hermes.model" $ | fromJson)) $.Values.settings -}}
{{- range splitList "." $form.path | compact }}{{ $value = get ($value | default dict) . }}{{ end -}}
{{- range kindIs "slice" $value | ternary $value (list $value) | compact }}
{{- if not (regexMatch $form.pattern (toString .)) }}
{{- fail (printf "settings%s %s, not %q" $form.path $form.takes .) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $section, $names := $rules.formerNames }}
{{- $given := get $.Values.settings $section | default dict }}
{{- range $old, $new := $names }}
{{- if and (hasKey $given $old) (hasKey $given $new) }}
{{- fail (printf "settings.%s.%s is the former name of settings.%s.%s, and both are set: remove settings.%s.%s" $section $old $section $new $section $old) }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq (.Values.settings.engine.kind | default "vllm") "vllm" }}
{{- range $name, $value := .Values.settings.engine.args }}
{{- $plain := replace "-" "_" $name -}}
{{- if and (eq $plain "chat_template") (eq (toString $value) "") }}
{{- fail (printf "settings.engine.args.%s is empty: remove it" $name) }}
{{- end }}
{{- with get $rules.withoutMeaning $plain }}
{{- fail (printf "settings.engine.args.%s %s" $name .) }}
{{- end }}
{{- if not (has $plain $rules.withMeaning) }}
{{- fail (printf "settings.engine.args.%s is no argument of vLLM: remove it" $name) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (hasKey (.Values.env | default dict) "RAY_SERVE_ENABLE_HA_PROXY") (ne .Values.env.RAY_SERVE_ENABLE_HA_PROXY "1") }}
{{- fail "env.RAY_SERVE_ENABLE_HA_PROXY is not '1', but probes, Services and the network policy need HAProxy: remove it" }}
{{- end }}
{{- end }}

{{- define "hermes.validateSecrets" -}}
{{- $redis := .Values.redis -}}
{{- $enabled := list -}}
{{- range list "internal" "ha" "external" }}
{{- if (get $redis .).enabled }}{{ $enabled = append $enabled (printf "redis.%s" .) }}{{ end }}
{{- end -}}
{{- if ne (len $enabled) 1 }}
{{- fail (printf "of redis.internal, redis.ha and redis.external exactly one must be enabled, but these are: %s" (join ", " $enabled | default "none")) }}
{{- end }}
{{- if and $redis.ha.enabled (not $redis.ha.name) }}
{{- fail "redis.ha.name is empty: set it to the fullnameOverride of helm/redis-ha.yaml" }}
{{- end }}
{{- if and $redis.internal.exporter.enabled (not $redis.internal.enabled) }}
{{- fail "redis.internal.exporter.enabled needs redis.internal: monitor another Redis where it runs (the chart redis-ha has an exporter of its own)" }}
{{- end }}
{{- if $redis.external.enabled }}
{{- if not $redis.external.existingSecret }}
{{- fail "redis.external.existingSecret is empty: create a Secret that holds the URL and set its name" }}
{{- end }}
{{- if and .Values.gcsFaultTolerance.enabled (not $redis.external.gcsAddress) }}
{{- fail "redis.external.gcsAddress is empty: set it to host:port for Ray's GCS, or set gcsFaultTolerance.enabled=false" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (not $redis.external.cidrs) }}
{{- fail "redis.external.cidrs is empty, so the network policy would block Redis: set its addresses, or set networkPolicy.enabled=false" }}
{{- end }}
{{- if .Values.gcsFaultTolerance.enabled }}
{{- $port := regexFind "[0-9]+$" $redis.external.gcsAddress -}}
{{- if and .Values.networkPolicy.enabled (not (has $port (toStrings $redis.external.ports))) }}
{{- fail (printf "redis.external.gcsAddress has the port %s, which is not among redis.external.ports: the network policy would block Ray's GCS" $port) }}
{{- end }}
{{- if and $redis.external.caKey (not (hasPrefix "rediss://" $redis.external.gcsAddress)) }}
{{- fail (printf "redis.external.caKey is set, but redis.external.gcsAddress (%s) is not rediss://host:port: Ray's GCS would connect without TLS" $redis.external.gcsAddress) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.hub.existingSecret (not (include "hermes.hubAccess" .)) }}
{{- fail "hub.existingSecret names a token, but engines do not ask the hub (hub.access is false, or the model is no hub id), so nothing would use it: set hub.access=true or remove it" }}
{{- end }}
{{- /* A list is never empty where Helm talks to a cluster: without items it still has its kind. Who installs may list accounts. */}}
{{- if not (lookup "v1" "ServiceAccount" .Release.Namespace "") }}
{{- range $path, $of := dict "auth" .Values.auth "redis.internal" $redis.internal "redis.ha" $redis.ha }}
{{- if and $of.enabled (not $of.existingSecret) }}
{{- fail (printf "%s.existingSecret is empty, and Helm does not see the cluster (helm template, --dry-run=client, Argo CD), so each rendering would make new keys and passwords: create the Secret yourself (docs/kubernetes.md shows how) and set its name" $path) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hermes.validateSizes" -}}
{{- $workers := .Values.settings.workers -}}
{{- $gpu := eq $workers.device "gpu" -}}
{{- if and $gpu $workers.gpus_per_replica (lt (float64 $workers.gpus_per_replica) (float64 $workers.tensor_parallel_size)) }}
{{- fail (printf "settings.workers.gpus_per_replica (%v) is below settings.workers.tensor_parallel_size (%v): give one GPU to each rank" $workers.gpus_per_replica $workers.tensor_parallel_size) }}
{{- end }}
{{- if and $gpu (lt (float64 .Values.engines.gpus) (float64 (include "hermes.gpusPerEngine" .))) }}
{{- fail (printf "one engine takes %s GPUs (settings.workers.tensor_parallel_size), but a pod has %v (engines.gpus), and an engine must fit into one pod" (include "hermes.gpusPerEngine" .) .Values.engines.gpus) }}
{{- end }}
{{- if and (not $gpu) .Values.engines.gpus }}
{{- fail (printf "engines.gpus is %v, but settings.workers.device is 'cpu': set engines.gpus=0" .Values.engines.gpus) }}
{{- end }}
{{- with include "hermes.autoscaling" . | fromJson }}
{{- if gt (int64 .min_replicas) (int64 .max_replicas) }}
{{- fail (printf "settings.workers.autoscaling.min_replicas (%v) is above max_replicas (%v)" .min_replicas .max_replicas) }}
{{- end }}
{{- end }}
{{- $engines := include "hermes.enginesPerPod" . | int -}}
{{- if lt (float64 .Values.engines.cpus) (mulf $engines (float64 $workers.cpus_per_replica)) }}
{{- fail (printf "%d engines in one pod reserve %v CPUs each (settings.workers.cpus_per_replica), but the pod has %v (engines.cpus)" $engines $workers.cpus_per_replica .Values.engines.cpus) }}
{{- end }}
{{- if lt $engines 1 }}
{{- fail (printf "no engine fits into a pod: an engine reserves %v CPUs (settings.workers.cpus_per_replica), but the pod has %v (engines.cpus)" $workers.cpus_per_replica .Values.engines.cpus) }}
{{- end }}
{{- $ingress := .Values.settings.ingress -}}
{{- if lt (float64 .Values.ingressPods.cpus) (mulf (include "hermes.ingressesPerPod" . | float64) (float64 $ingress.cpus_per_replica)) }}
{{- fail (printf "%v ingresses with %v CPUs each (settings.ingress) do not fit into %v pods of %v CPUs (ingressPods)" $ingress.replicas $ingress.cpus_per_replica .Values.ingressPods.replicas .Values.ingressPods.cpus) }}
{{- end }}
{{- with $ingress.max_replicas_per_node }}
{{- if lt (mul . $.Values.ingressPods.replicas) (int64 $ingress.replicas) }}
{{- fail (printf "%v ingresses (settings.ingress.replicas), at most %v per pod (max_replicas_per_node), do not fit into %v pods (ingressPods.replicas)" $ingress.replicas . $.Values.ingressPods.replicas) }}
{{- end }}
{{- end }}
{{- $ending := add .Values.drainSeconds 90 -}} {{- /* their grace period (30 more), and KubeRay's job in Redis */ -}}
{{- if and .Values.uninstall.enabled (lt (int64 .Values.uninstall.timeoutSeconds) (int64 $ending)) }}
{{- fail (printf "uninstall.timeoutSeconds (%v) is below %v, the time that pods may take to end (drainSeconds + 90): raise it, and run helm uninstall with a longer --timeout, or set uninstall.enabled=false" .Values.uninstall.timeoutSeconds $ending) }}
{{- end }}
{{- if gt (float64 $ingress.request_timeout_s) (float64 $ingress.max_request_timeout_s) }}
{{- fail (printf "settings.ingress.request_timeout_s (%v) is above max_request_timeout_s (%v)" $ingress.request_timeout_s $ingress.max_request_timeout_s) }}
{{- end }}
{{- $redis := .Values.redis.internal -}}
{{- $full := include "hermes.mebibytes" $redis.maxmemory | int -}}
{{- if gt (mul 10 $full) (mul 7 (include "hermes.mebibytes" $redis.memory | int)) }}
{{- fail (printf "redis.internal.maxmemory (%s) is above 70 %% of redis.internal.memory (%s): rewriting the append-only file needs additional memory" $redis.maxmemory $redis.memory) }}
{{- end }}
{{- if gt (mul 2 $full) (include "hermes.mebibytes" $redis.persistence.size | int) }}
{{- fail (printf "redis.internal.maxmemory (%s) is above half of redis.internal.persistence.size (%s): a rewrite needs space for the old and the new append-only file" $redis.maxmemory $redis.persistence.size) }}
{{- end }}
{{- end }}

{{- define "hermes.validateStorage" -}}
{{- $storage := include "hermes.storage" . -}}
{{- if hasPrefix "/" $storage }}
{{- $mounted := false }}
{{- range concat (.Values.extraVolumeMounts | default list) (.Values.ingressPods.extraVolumeMounts | default list) }}
{{- if hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) (printf "%s/" $storage) }}{{ $mounted = true }}{{ end }}
{{- end }}
{{- if not $mounted }}
{{- fail (printf "settings.files.storage is the folder %s, on which ingressPods.extraVolumeMounts mounts nothing: mount a volume that all ingress pods share, or use s3://bucket/prefix" $storage) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hermes.validateModel" -}}
{{- $model := include "hermes.model" . | fromJson -}}
{{- $weights := .Values.weights -}}
{{- if not $model.source }}
{{- fail "model is empty: set it to a hub id, or to a path below weights.mountPath" }}
{{- end }}
{{- if and .Values.model (ne .Values.model $model.source) }}
{{- fail (printf "model (%s) and settings.model.source (%s) are both set, but differ: remove one" .Values.model $model.source) }}
{{- end }}
{{- if and $weights.create $weights.existingClaim }}
{{- fail "weights.create and weights.existingClaim are both set: choose one" }}
{{- end }}
{{- if hasPrefix "/" $model.source }}
{{- if not (include "hermes.weightsClaim" .) }}
{{- fail (printf "the model is the path %s, but there is no volume for it: set weights.existingClaim or weights.create" $model.source) }}
{{- end }}
{{- if not (hasPrefix (printf "%s/" $weights.mountPath) $model.source) }}
{{- fail (printf "the model (%s) is not below weights.mountPath (%s)" $model.source $weights.mountPath) }}
{{- end }}
{{- else if and (not (hasPrefix "builtin:" $model.source)) (not (include "hermes.hubAccess" .)) }}
{{- if not (include "hermes.weightsClaim" .) }}
{{- fail (printf "the model (%s) is a hub id, but hub.access is false and there is no volume, so it cannot be loaded: set hub.access=true or weights.existingClaim" $model.source) }}
{{- end }}
{{- if and $weights.readOnly (not (hasKey (.Values.env | default dict) "HF_HOME")) }}
{{- fail (printf "the model (%s) is a hub id, but hub.access is false: set a path below weights.mountPath or, if the volume holds the hub's own cache, set env.HF_HOME" $model.source) }}
{{- end }}
{{- end }}
{{- if $weights.create }}
{{- if $weights.readOnly }}
{{- fail "weights.create makes an empty volume, but weights.readOnly prevents filling it: set weights.readOnly=false" }}
{{- end }}
{{- if not (or (has "ReadWriteMany" $weights.accessModes) (has "ReadWriteOnce" $weights.accessModes)) }}
{{- fail "weights.accessModes has neither ReadWriteMany nor ReadWriteOnce, but engines must write to the volume" }}
{{- end }}
{{- if not (has "ReadWriteMany" $weights.accessModes) }}
{{- if gt (include "hermes.maxEnginePods" . | int) 1 }}
{{- fail (printf "weights.accessModes has no ReadWriteMany, but up to %s engine pods share the volume" (include "hermes.maxEnginePods" .)) }}
{{- end }}
{{- if eq .Values.upgrade.type "NewCluster" }}
{{- fail "weights.accessModes has no ReadWriteMany, but during an upgrade a second Ray cluster on other nodes needs the volume too: set upgrade.type=None" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hermes.validateDoors" -}}
{{- if and .Values.ingress.enabled .Values.httpRoute.enabled }}
{{- fail "ingress.enabled and httpRoute.enabled are both true: choose one" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
{{- fail "ingress.host is empty: set the host name that clients call" }}
{{- end }}
{{- if .Values.httpRoute.enabled }}
{{- if not .Values.httpRoute.hosts }}
{{- fail "httpRoute.hosts is empty: set the host names that clients call" }}
{{- end }}
{{- if not .Values.httpRoute.parentRefs }}
{{- fail "httpRoute.parentRefs is empty: set the Gateway" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "hermes.validateNetwork" -}}
{{- if and .Values.networkPolicy.enabled (or .Values.ingress.enabled .Values.httpRoute.enabled) (not .Values.networkPolicy.servingFrom) }}
{{- fail "networkPolicy.servingFrom is empty, so only this namespace can reach the service: set the peers of your ingress controller or Gateway" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (include "hermes.autoscaling" . | fromJson) (not .Values.networkPolicy.apiServerCidrs) }}
{{- fail "networkPolicy.apiServerCidrs is empty, so the autoscaler (settings.workers.autoscaling) could not request pods: set the addresses of the Kubernetes API" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.uninstall.enabled (not .Values.networkPolicy.apiServerCidrs) }}
{{- fail "networkPolicy.apiServerCidrs is empty, so the job of helm uninstall could not delete the RayService: set the addresses of the Kubernetes API, or set uninstall.enabled=false" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (include "hermes.hubAccess" .) (not .Values.networkPolicy.hubCidrs) }}
{{- fail "networkPolicy.hubCidrs is empty, so engines could not download anything although they may ask the hub (hub.access): set the addresses of the hub" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled (hasPrefix "s3://" (include "hermes.storage" .)) (not .Values.networkPolicy.storageTo) }}
{{- fail "networkPolicy.storageTo is empty, so no file would reach settings.files.storage: set the peers of your S3" }}
{{- end }}
{{- if and .Values.networkPolicy.enabled .Values.settings.telemetry.traces_endpoint (not .Values.networkPolicy.tracesTo) }}
{{- fail "networkPolicy.tracesTo is empty, so no trace would reach settings.telemetry.traces_endpoint: set the collector's peers" }}
{{- end }}
{{- end }}
